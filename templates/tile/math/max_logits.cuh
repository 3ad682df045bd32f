//===- tile/math/max_logits.cuh - The largest score of a head ---------------------===//
//
// Kernels that give the largest score of each head have this file in the place of
// no_max_logits.cuh. The softmax finds the maximum of each row and group in any case, and the
// largest of these is one selection and one maximum more. Groups' maxima have a headroom
// (softmax.cuh), by which the result is too large: two steps of INT32 sums at most, and a part in
// 2^22 where scores are floats. To find exact maxima as well costs 2 to 5 % of the instructions.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/reduce.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/math/plain_score.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/visible.cuh"

constexpr bool MAX_LOGITS = true;

/// All four lanes of a quad know the maxima of rows g and g + 8: lanes with an even number keep
/// those of the first, and the others those of the second.
class MaxLogit {
public:
  /// Row g + 8r starts from key 0, whose score is in units of log2, as all are.
  __device__ __forceinline__ void start_from(int r, float score_of_sink) {
    if (r == own_row())
      largest_ = score_of_sink;
  }

  /// Takes the maxima of a group, -inf where a row sees no key.
  __device__ __forceinline__ void take(const float (&maximum)[2]) {
    largest_ = max_number(largest_, own_row() ? maximum[1] : maximum[0]);
  }

  /// The end, of rows that count or do not, of which the first is a query. Of a query whose lse is
  /// NaN some score may be NaN, which is no maximum: `is_nan` of any lane.
  __device__ __forceinline__ void end(const QueryHead& at, int warp_query, const bool (&counts)[2],
                                      bool is_nan) const {
    const int query = warp_query + lane_id() / 4 + 8 * own_row();
    float found = -INFINITY_F;
    if (own_row() ? counts[1] : counts[0]) {
      found = LN_2 * largest_;
      if constexpr (USES_MEAN && !BENDS_SCORES) // back to the raw domain, as lse
        found += read_row(at.p.q_rows, at.padded_query(), query, ROW_SHIFT);
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2)
      found = max_number(found, __shfl_xor_sync(~0u, found, lanes));
    const bool any_is_nan = __any_sync(~0u, is_nan);
    if (lane_id() == 0)
      raise_maximum(at.p.max_logits + at.head, any_is_nan ? __int_as_float(0x7fffffff) : found);
  }

private:
  static __device__ __forceinline__ int own_row() { return lane_id() & 1; }

  float largest_ = -INFINITY_F;
};
