//===- tile/prepass/value_range.cuh - The sum and the range of a chunk of values ----===//
//
// The pre-pass over keys finds this of V where dP is summed in FP16 (tile/math/dp_sums16.cuh). A
// thread has 8 channels of every ROWS_AT_ONCE-th token.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/prepass/half_operands.cuh"
#include "tile/prepass/key_range.cuh"

/// Writes those of a chunk of so many tokens. `values` is the first at this thread's channels.
__device__ __forceinline__ void write_value_range(float* range, const Element* values, s64 stride,
                                                  int tokens, int channels, OfRows& of_rows) {
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  float sum[8] = {};
  KeyMaxima maxima;
#pragma unroll 8
  for (int token = row; token < tokens; token += ROWS_AT_ONCE) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (is_channel(octet * 8, channels))
      words = *reinterpret_cast<const uint4*>(values + token * stride);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<Element>(pairs[i]);
      sum[2 * i] += x.x;
      sum[2 * i + 1] += x.y;
      maxima.take(2 * i, x.x);
      maxima.take(2 * i + 1, x.y);
    }
  }
  write_maxima(range + HIGHEST_VALUES, maxima.highest, of_rows);
  write_maxima(range + LOWEST_VALUES, maxima.lowest, of_rows);
  write_sums(range, sum, of_rows);
}
