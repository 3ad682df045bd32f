//===- tile/math/max_logits.cuh - The largest score of a head ---------------------===//
//
// Kernels that give the largest score of each head have this file in the place of
// no_max_logits.cuh. Groups' maxima have headroom (softmax.cuh), and to find each group's exact one
// would cost 2 to 5 % of the instructions. So a thread keeps a limit: as far a group's maximum can
// be above the reference of one of its rows without being above the largest score of the head that
// its warp has heard of. One vote asks for limits and for references that move. Only where it says
// yes the warp finds the exact maximum, and hears what other warps of the block have found. Limits
// are low by more than what is rounded. So the result is the largest of all scores, in whatever
// order warps come. All else lies in shared memory: registers are short.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/max_logits.cuh"
#include "ptx/reduce.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/math/plain_score.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/math/rise.cuh"
#include "tile/walk/visible.cuh"

constexpr bool MAX_LOGITS = true;
constexpr int MAX_LOGITS_BYTES = max_logits_bytes(BLOCK_Q);

class MaxLogit {
public:
  /// Threads of a block call this before any of them calls begin(), with a barrier in between,
  /// where warps may be at different groups.
  static __device__ __forceinline__ void clear() {
    if (threadIdx.x < OWN_WARPS)
      largest()[threadIdx.x] = -INFINITY_F;
  }

  /// The block's queries begin at `first_query`. With SINK_KEYS the rows' references are key 0's
  /// scores.
  __device__ __forceinline__ void begin(const float (&reference)[2], const QueryHead& at,
                                        int first_query) {
    const int row = own_row();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + row + 8 * r;
      float shift = 0;
      if (query >= at.seq_q() || (SINK_KEYS && sees_nothing(at, query)))
        shift = -INFINITY_F;
      else if constexpr (USES_MEAN && !BENDS_SCORES) // back to the raw domain, as lse
        shift = read_row(at.p.q_rows, at.padded_query(), query, ROW_SHIFT);
      shifts()[row + 8 * r] = shift;
    }
    if (lane_id() == 0)
      largest()[warp_id()] = read_maximum(at.p.max_logits + at.head);
    __syncwarp();
    if constexpr (SINK_KEYS)
      take<false>(reference, reference);
  }

  /// Whether the warp has to act, of which a thread's rows have maxima so far above references.
  __device__ __forceinline__ bool asks(const float (&rise)[2]) const {
    return max_number(rise[0], rise[1]) > limit_;
  }

  /// Takes the largest scores of rows g and g + 8 among this thread's columns, -inf where there is
  /// none, and the rows' references, all in units of log2. The warp hears what it knows itself, or
  /// with HEARS_OTHERS what all warps of the block know.
  template <bool HEARS_OTHERS = true>
  __device__ __forceinline__ void take(const float (&score)[2], const float (&reference)[2]) {
    const int row = own_row(), lane = lane_id();
    const float shift[2] = {shifts()[row], shifts()[row + 8]};
    float found = max_number(__fmaf_rn(LN_2, score[0], shift[0]), //
                             __fmaf_rn(LN_2, score[1], shift[1]));
    if (HEARS_OTHERS ? lane < OWN_WARPS : lane == row / 16)
      found = max_number(found, largest()[lane]);
    found = quad_max_number(found);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
      found = max_number(found, __shfl_xor_sync(~0u, found, lanes));
    if (lane == 0)
      largest()[row / 16] = found;
    __syncwarp(); // no lane reads, the next time, what was there before
    limit_ = RISE;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      constexpr float ROUNDED = 0x1p-20f;
      const float size = (fabsf(found) + fabsf(shift[r])) * LOG2_E + fabsf(reference[r]);
      const float limit = (found - shift[r]) * LOG2_E - reference[r] - ROUNDED * size;
      if (limit < limit_) // which NaN is not, as of rows that do not count
        limit_ = limit;
    }
  }

  /// Tells others what the warp has found. Of a query whose lse is NaN some score may be NaN, which
  /// is no maximum: `is_nan` of any lane.
  __device__ __forceinline__ void end(const QueryHead& at, bool is_nan) const {
    const bool is_any = __any_sync(~0u, is_nan);
    if (lane_id() == 0)
      raise_maximum(at.p.max_logits + at.head,
                    is_any ? __int_as_float(0x7fffffff) : largest()[warp_id()]);
  }

private:
  static constexpr int OWN_WARPS = BLOCK_Q / 16;
  static __device__ __forceinline__ volatile float* shifts() {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return reinterpret_cast<volatile float*>(shared_memory + MAX_LOGITS_OFFSET);
  }
  static __device__ __forceinline__ volatile float* largest() { return shifts() + BLOCK_Q; }
  static __device__ __forceinline__ int own_row() {
    const int thread = reread_thread();
    return thread / 32 * 16 + (thread & 31) / 4;
  }

  float limit_ = RISE;
};
