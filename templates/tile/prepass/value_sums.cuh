//===- tile/prepass/value_sums.cuh - The sum of some values of a chunk -------------===//
//
// For the mean of V (tile/math/smoothed_values.cuh). Any vector would do that is about the mean, so
// one token in VALUE_STEP is enough.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/values_as_given.cuh"
#include "tile/prepass/key_range.cuh"

constexpr int VALUE_STEP = 8;
static_assert(MEAN_CHUNK % VALUE_STEP == 0, "or steps would begin anew in each chunk");

/// How many of a head's tokens count.
__device__ __forceinline__ int summed_values(int tokens) {
  return (tokens + VALUE_STEP - 1) / VALUE_STEP;
}

/// Writes that of a chunk of so many tokens. `values` is the first at this thread's channels.
__device__ __forceinline__ void write_value_sums(float* sums, const Element* values, s64 stride,
                                                 int tokens, int channels, OfRows& of_rows) {
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  float sum[8] = {};
#pragma unroll 4
  for (int token = row * VALUE_STEP; token < tokens; token += ROWS_AT_ONCE * VALUE_STEP) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (is_channel(octet * 8, channels))
      words = *reinterpret_cast<const uint4*>(values + token * stride);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<Element>(pairs[i]);
      sum[2 * i] += x.x;
      sum[2 * i + 1] += x.y;
    }
  }
  write_sums(sums, sum, of_rows);
}
