//===- tile/accumulators.cuh - What meets a warp's accumulators -------------===//
//
// A warp holds 16 rows: x[j][i] of lane 4g + t is row g (i < 2) or g + 8, column 8j + 2t + i % 2.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/permutation.cuh"
#include "tile/shared_tile.cuh"

constexpr int VALUE_ROW_BYTES = HEAD_DIM * 2;    ///< a token of V or dO, 16-bit
constexpr int TOKEN_ROW_BYTES = TOKENS_PER_TILE; ///< a channel of a transposed tile, 8-bit
constexpr int SCORE_ROW_BYTES = QK16 ? HEAD_DIM * 2 : HEAD_DIM; ///< a token of Q or K for S

/// Four accumulators of one n8 tile, as a value.
struct Quad {
  float x[4];
};

/// Vectors that meet the columns of accumulators lie in the order sigma too: one 16-byte read then
/// gives a thread its four columns of a pair of n8 tiles: 2t, 2t+1 of the first and of the second.
__device__ __forceinline__ float4 read_columns(u32 vector, int pair) {
  return read_float4(vector + pair * 64 + (lane_id() & 3) * 16);
}
/// The same from global memory, for what is read once in a while.
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

/// A warp's 16 x HEAD_DIM sums of products. Those of INT8 with a transposed copy are in units of
/// its channels' scales, and each row of them is too large by its `surplus` (products_mma.cuh).
struct Sums {
  float x[HEAD_DIM / 8][4] = {};
  float surplus[2] = {0, 0};

  /// Takes the surplus off and brings the sums to other units: column c times from(c) times to(c).
  /// Both are the addresses of HEAD_DIM floats, `to` usually the inverses of the new units.
  template <typename Vector> __device__ __forceinline__ void change_units(Vector from, Vector to) {
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
      const float4 a = read_columns(from, pair), b = read_columns(to, pair);
      const float ratio[4] = {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
      multiply_columns(pair, ratio);
    }
    surplus[0] = surplus[1] = 0;
  }
  /// The same to units of 1.
  template <typename Vector> __device__ __forceinline__ void leave_units(Vector from) {
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
      const float4 a = read_columns(from, pair);
      const float unit[4] = {a.x, a.y, a.z, a.w};
      multiply_columns(pair, unit);
    }
    surplus[0] = surplus[1] = 0;
  }
  /// Takes the surplus off: before it outgrows what it is added to, and where there are no units.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] -= surplus[i >> 1];
    }
    surplus[0] = surplus[1] = 0;
  }
  __device__ __forceinline__ void multiply_rows(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] *= factor[i >> 1];
    }
    surplus[0] *= factor[0];
    surplus[1] *= factor[1];
  }

private:
  __device__ __forceinline__ void multiply_columns(int pair, const float (&factor)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = x[2 * pair + half][i];
        sum = (sum - surplus[i >> 1]) * factor[2 * half + (i & 1)];
      }
    }
  }
};

/// Writes a warp's 16 x HEAD_DIM accumulators as rows of a 16-bit tensor; rows at or past
/// `valid_rows` are not touched.
__device__ __forceinline__ void store_rows(Element* rows, s64 stride, int valid_rows,
                                           const float (&x)[HEAD_DIM / 8][4], float factor_low,
                                           float factor_high) {
  const int row = lane_id() >> 2, column = (lane_id() & 3) * 2;
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; ++j) {
    if (row < valid_rows)
      *reinterpret_cast<u32*>(rows + row * stride + 8 * j + column) =
          pack<Element>(x[j][0] * factor_low, x[j][1] * factor_low);
    if (row + 8 < valid_rows)
      *reinterpret_cast<u32*>(rows + (row + 8) * stride + 8 * j + column) =
          pack<Element>(x[j][2] * factor_high, x[j][3] * factor_high);
  }
}
