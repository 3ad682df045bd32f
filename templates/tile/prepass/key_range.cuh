//===- tile/prepass/key_range.cuh - How large a chunk of keys and values is ---------===//
//
// The pre-pass over keys adds this to their sums where dQ is summed in FP16
// (tile/dq/dq_factor.cuh). A thread has 8 channels of every ROWS_AT_ONCE-th token.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/convert.cuh"
#include "tile/dq/dq_factor.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/channels.cuh"

constexpr int OCTETS = HEAD_DIM / 8; ///< threads that share a token, 8 channels each
constexpr int ROWS_AT_ONCE = THREADS / OCTETS;
static_assert(THREADS % HEAD_DIM == 0, "a channel without a thread would be left out");
using OfRows = float[ROWS_AT_ONCE][HEAD_DIM]; ///< what rows of threads hand each other

/// The largest values of 8 channels of K, and of -K.
struct KeyMaxima {
  float highest[8], lowest[8];

  __device__ __forceinline__ KeyMaxima() {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      highest[i] = lowest[i] = -INFINITY_F;
  }
  __device__ __forceinline__ void take(int i, float x) {
    highest[i] = max_nan(highest[i], x);
    lowest[i] = max_nan(lowest[i], -x);
  }
};

/// Writes the maxima over the block's rows.
__device__ __forceinline__ void write_maxima(float* to, const float (&x)[8], OfRows& of_rows) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    of_rows[threadIdx.x / OCTETS][threadIdx.x % OCTETS * 8 + i] = x[i];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float largest = of_rows[0][threadIdx.x];
#pragma unroll
    for (int row = 1; row < ROWS_AT_ONCE; ++row)
      largest = max_nan(largest, of_rows[row][threadIdx.x]);
    to[threadIdx.x] = largest;
  }
}

/// Writes the sums over the block's rows, always in the same order.
__device__ __forceinline__ void write_sums(float* to, const float (&x)[8], OfRows& of_rows) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    of_rows[threadIdx.x / OCTETS][threadIdx.x % OCTETS * 8 + i] = x[i];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float total = 0;
#pragma unroll
    for (int row = 0; row < ROWS_AT_ONCE; ++row)
      total += of_rows[row][threadIdx.x];
    to[threadIdx.x] = total;
  }
}

/// The largest over the block.
__device__ __forceinline__ float block_max_of(float x, OfRows& of_rows) {
  x = warp_max_nan(x);
  __syncthreads();
  if (lane_id() == 0)
    of_rows[0][warp_id()] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp)
    x = max_nan(x, of_rows[0][warp]);
  return x;
}

/// The greatest length of the chunk's rows of V, of which `values` is the first at this thread's
/// channels.
__device__ __forceinline__ float longest_value(const Element* values, s64 stride, int tokens,
                                               int channels, OfRows& of_rows) {
  float squares = 0, largest = 0;
#pragma unroll 4
  for (int first = 0; first < tokens; first += ROWS_AT_ONCE) { // as often in every lane of a warp
    const int token = first + threadIdx.x / OCTETS;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (token < tokens && is_channel(threadIdx.x % OCTETS * 8, channels))
      words = *reinterpret_cast<const uint4*>(values + token * stride);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<Element>(pairs[i]);
      sum += x.x * x.x;
      sum += x.y * x.y;
      largest = max_magnitude(max_magnitude(largest, x.x), x.y);
    }
#pragma unroll
    for (int lanes = 1; lanes < OCTETS; lanes *= 2)
      sum += __shfl_xor_sync(~0u, sum, lanes);
    squares = max_nan(squares, sum);
  }
  squares = block_max_of(squares, of_rows);
  return length_of(squares, block_max_of(largest, of_rows));
}

/// Writes that of a chunk of so many keys, from the maxima of the block's threads.
__device__ __forceinline__ void write_key_range(float* range, const KeyMaxima& keys,
                                                const Element* values, s64 stride, int tokens,
                                                int channels, OfRows& of_rows) {
  write_maxima(range, keys.highest, of_rows);
  write_maxima(range + LOWEST_KEYS, keys.lowest, of_rows);
  const float length = longest_value(values, stride, tokens, channels, of_rows);
  if (threadIdx.x == 0)
    range[LONGEST_VALUE] = length;
}
