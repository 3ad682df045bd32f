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
