//===- tile/math/accumulators.cuh - What meets a warp's accumulators -------------===//
//
// A warp holds 16 rows: x[j][i] of lane 4g + t is row g (i < 2) or g + 8, column 8j + 2t + i % 2.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/memory/block_shape.cuh"
#include "tile/memory/permutation.cuh"
#include "tile/memory/shared_tile.cuh"

constexpr int VALUE_ROW_BYTES = SHAPE.value_row; ///< a token of V or dO, 16-bit
constexpr int SUM_ROW_BYTES = SHAPE.sum_row;     ///< of these channels of V or dO
constexpr int TOKEN_ROW_BYTES = TOKENS_PER_TILE; ///< a channel of a transposed tile, 8-bit
constexpr int SCORE_ROW_BYTES = SHAPE.score_row; ///< a token of Q or K for S

/// Four accumulators of one n8 tile, as a value.
struct Quad {
  float x[4];
};

/// Vectors that meet the columns of accumulators lie in the order sigma too: one 16-byte read then
/// gives a thread its four columns of a pair of n8 tiles: 2t, 2t+1 of the first and of the second.
__device__ __forceinline__ float4 read_columns(u32 vector, int pair) {
  return read_float4(vector + pair * 64 + (lane_id() & 3) * 16);
}
/// Reads from global memory, for what is read once in a while.
__device__ __forceinline__ float4 read_columns(const float* vector, int pair) {
  return reinterpret_cast<const float4*>(vector)[pair * 4 + (lane_id() & 3)];
}

/// dS = P (dP - delta), in dP's place; with MAXIMA also the largest magnitudes of rows g and g + 8.
template <bool MAXIMA, int COLUMNS8>
__device__ __forceinline__ void score_gradients(float (&ds)[COLUMNS8][4],
                                                const float (&probabilities)[COLUMNS8][4],
                                                float (&largest)[2]) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ds[j][i] *= probabilities[j][i];
      if constexpr (MAXIMA)
        largest[i >> 1] = max_magnitude(largest[i >> 1], ds[j][i]);
    }
  }
}

/// One of a query's row vectors in global memory.
__device__ __forceinline__ float read_row(const float* q_rows, s64 first_row, int query,
                                          int vector) {
  const s64 tile = (first_row + query) / TOKENS_PER_TILE;
  return q_rows[(tile * ROW_VECTORS + vector) * TOKENS_PER_TILE +
                sigma_slot(query % TOKENS_PER_TILE)];
}

/// A query's value of a vector that has one for each.
__device__ __forceinline__ float read_vector(const float* vector, s64 first_row, int query) {
  const s64 tile = (first_row + query) / TOKENS_PER_TILE;
  return vector[tile * TOKENS_PER_TILE + sigma_slot(query % TOKENS_PER_TILE)];
}

/// ratios[c] = from[c] * to[c], for SUM_CHANNELS channels, all in shared memory: the factor that
/// converts a sum of channel c from the old scale, `from`, to the new one, whose inverse is `to`.
/// Each of THREADS_HERE threads calls this with its number.
template <int THREADS_HERE>
__device__ __forceinline__ void form_ratios(u32 ratios, u32 from, u32 to, int thread) {
#pragma unroll
  for (int first = 0; first < SUM_CHANNELS; first += THREADS_HERE) {
    const int offset = (first + thread) * 4;
    if (SUM_CHANNELS % THREADS_HERE == 0 || offset < SUM_CHANNELS * 4)
      write_float(ratios + offset, read_float(from + offset) * read_float(to + offset));
  }
}

/// A warp's 16 x SUM_CHANNELS sums of products. Sums of INT8 products with a transposed copy are in
/// units of its channels' scales, and each row is too large by its magic-number `bias`
/// (products_mma.cuh).
struct Sums {
  float x[SUM_CHANNELS / 8][4] = {};
  float bias[2] = {0, 0};

  /// Subtracts the bias and multiplies each column by one of SUM_CHANNELS floats: the ratio of the
  /// scale that it is in to another, or, at the end, that scale.
  template <typename Vector> __device__ __forceinline__ void multiply_columns(Vector factors) {
#pragma unroll
    for (int pair = 0; pair < SUM_CHANNELS / 16; ++pair) {
      const float4 of_pair = read_columns(factors, pair);
      const float factor[4] = {of_pair.x, of_pair.y, of_pair.z, of_pair.w};
      multiply_columns(pair, factor);
    }
    bias[0] = bias[1] = 0;
  }
  /// Rescales from scales to others, as form_ratios() and multiply_columns() do together: in
  /// kernels that are short of registers ptxas spills with those (compiled: mma.sync's gradients, 8
  /// to 76 bytes).
  template <typename Vector>
  __device__ __forceinline__ void rescale_columns(Vector from, Vector to) {
#pragma unroll
    for (int pair = 0; pair < SUM_CHANNELS / 16; ++pair) {
      const float4 a = read_columns(from, pair), b = read_columns(to, pair);
      const float factor[4] = {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
      multiply_columns(pair, factor);
    }
    bias[0] = bias[1] = 0;
  }
  /// Rescales too, by a warp that waits for no other: `ratios` are its own.
  __device__ __forceinline__ void rescale_columns_of_warp(u32 ratios, u32 from, u32 to) {
    __syncwarp();
    form_ratios<32>(ratios, from, to, lane_id());
    __syncwarp();
    multiply_columns(ratios);
  }
  /// Subtracts the bias before it outgrows what it is added to, where there are no channel scales.
  __device__ __forceinline__ void subtract_bias() {
#pragma unroll
    for (int j = 0; j < SUM_CHANNELS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] -= bias[i >> 1];
    }
    bias[0] = bias[1] = 0;
  }
  __device__ __forceinline__ void multiply_rows(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < SUM_CHANNELS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] *= factor[i >> 1];
    }
    bias[0] *= factor[0];
    bias[1] *= factor[1];
  }

private:
  __device__ __forceinline__ void multiply_columns(int pair, const float (&factor)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = x[2 * pair + half][i];
        sum = (sum - bias[i >> 1]) * factor[2 * half + (i & 1)];
      }
    }
  }
};

/// Writes a warp's 16 x SUM_CHANNELS accumulators as rows of a 16-bit tensor; rows at or past
/// `valid_rows` are not touched.
__device__ __forceinline__ void store_rows(Element* rows, s64 stride, int valid_rows, int channels,
                                           const float (&x)[SUM_CHANNELS / 8][4], float factor_low,
                                           float factor_high) {
  const int row = lane_id() >> 2, column = (lane_id() & 3) * 2;
#pragma unroll
  for (int j = 0; j < SUM_CHANNELS / 8; ++j) {
    if (!is_channel(first_channel() + 8 * j, channels))
      continue;
    if (row < valid_rows)
      *reinterpret_cast<u32*>(rows + row * stride + 8 * j + column) =
          pack<Element>(x[j][0] * factor_low, x[j][1] * factor_low);
    if (row + 8 < valid_rows)
      *reinterpret_cast<u32*>(rows + (row + 8) * stride + 8 * j + column) =
          pack<Element>(x[j][2] * factor_high, x[j][3] * factor_high);
  }
}
/// The block writes zeros to the first rows of such a tensor, two channels a thread at a time.
__device__ __forceinline__ void store_zeros(Element* rows, s64 stride, int count, int channels) {
  const int pairs = channels / 2;
  for (int i = threadIdx.x; i < count * pairs; i += THREADS)
    *reinterpret_cast<u32*>(rows + i / pairs * stride + i % pairs * 2) = 0;
}
