//===- tile/dq/dq_sums16.cuh - What sums of dQ in memory are made of -----------===//
//
// In FP32 a warp's accumulators lie as tile/dq/dq_layout.cuh says. DQ_SUM16: FP16, half the bytes
// to stage and to add, each query's by its factor (tile/dq/dq_factor.cuh), a power of two; a lane's
// accumulators of two n8 tiles of channels are 16 bytes. A warp executes 32 instructions a tile of
// 64 queries more at 64 channels and 54 more at 128, of 448 and 464 (compiled, sm_90a).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/dq/dq_layout.cuh"

template <bool IN_FP16> struct FormatOfSums { using Type = float; };
template <> struct FormatOfSums<true> { using Type = fp16; };
using DqSum = FormatOfSums<DQ_SUM16>::Type;

__device__ __forceinline__ DqSum* dq_sums_of(const Params& p) {
  return reinterpret_cast<DqSum*>(p.dq_sum);
}

/// This lane's accumulators of n8 tiles 2 pair and 2 pair + 1 lie here, one after the other.
__device__ __forceinline__ int dq_place16(int pair) {
  return pair * (DQ_ROWS * 16) + lane_id() * 8;
}

/// Factors of queries g and g + 8 of a warp's 16, in shared memory from `factors` on.
__device__ __forceinline__ float2 read_factors(u32 factors) {
  const int row = lane_id() / 4;
  const u32 place = factors + row / 2 * 4;
  const float2 low = unpack<bf16>(read_word(place)), high = unpack<bf16>(read_word(place + 16));
  return {row % 2 ? low.y : low.x, row % 2 ? high.y : high.x};
}

/// Writes a warp's accumulators of so many channels, by their factors, to shared memory.
template <int CHANNELS>
__device__ __forceinline__ void write_dq16(u32 own, const float (*dq)[4], float2 factor) {
#pragma unroll
  for (int pair = 0; pair < CHANNELS / 16; ++pair) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float(&x)[4] = dq[2 * pair + i];
      words[2 * i] = pack<fp16>(x[0] * factor.x, x[1] * factor.x);
      words[2 * i + 1] = pack<fp16>(x[2] * factor.y, x[3] * factor.y);
    }
    write_words(own + dq_place16(pair) * 2, words);
  }
}

/// Adds the sums of a warp's 16 queries, `sums` and `factors` being the first's.
template <int N8>
__device__ __forceinline__ void add_sums(float (&dq)[N8][4], const float* sums, const bf16*) {
#pragma unroll
  for (int j = 0; j < N8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      dq[j][i] += sums[dq_place(j) + i * DQ_STRIDE];
  }
}
/// Powers of two have exact reciprocals.
template <int N8>
__device__ __forceinline__ void add_sums(float (&dq)[N8][4], const fp16* sums,
                                         const bf16* factors) {
  const int row = lane_id() / 4;
  const float low = __fdiv_rn(1, unpack<bf16>(factors[row].bits).x),
              high = __fdiv_rn(1, unpack<bf16>(factors[row + 8].bits).x);
#pragma unroll
  for (int pair = 0; pair < N8 / 2; ++pair) {
    const uint4 four = *reinterpret_cast<const uint4*>(sums + dq_place16(pair));
    const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<fp16>(words[i]);
      const float inverse = i % 2 ? high : low;
      float(&to)[4] = dq[2 * pair + i / 2];
      to[i % 2 * 2] += x.x * inverse;
      to[i % 2 * 2 + 1] += x.y * inverse;
    }
  }
}
