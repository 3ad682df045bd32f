//===- tile/sla/token_sums.cuh - Matrices of channels that sum over tokens -----===//
#pragma once

#include "tile/sla/channel_matrix.cuh"

/// X^T Y of two tiles of the block, a matrix of channels by channels. A warp has ROWS of its rows
/// and half of its columns.
struct MatrixSums {
  static constexpr int ROWS = 2 * HEAD_DIM / WARPS, COLUMNS = HEAD_DIM / 2;
  static_assert(WARPS == 4 || WARPS == 8, "128 or 64 tokens");
  float x[ROWS / 16][COLUMNS / 16][2][4] = {};

  template <int TOKENS> __device__ __forceinline__ void sum(u32 of_rows, u32 of_columns) {
    const int row16 = warp_id() / 2 * (ROWS / 16), column16 = warp_id() % 2 * (COLUMNS / 16);
    const ColumnsOfA left(of_rows);
    const ColumnsOfB right(of_columns);
#pragma unroll 2
    for (int token = 0; token < TOKENS; token += 16) {
      u32 a[ROWS / 16][4];
#pragma unroll
      for (int i = 0; i < ROWS / 16; ++i)
        left.load(a[i], token, row16 + i);
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; ++j) {
        u32 b[4];
        right.load(b, token, column16 + j);
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
          multiply(x[i][j], a[i], b);
      }
    }
  }
  /// Stores the matrix by way of `matrix`, which the barrier here leaves to it.
  __device__ __forceinline__ void store(bf16* to, u32 matrix) const {
    __syncthreads();
    const int row = warp_id() / 2 * ROWS, octet = warp_id() % 2 * (COLUMNS / 8);
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i) {
      const WordPlaces places(matrix, row + 16 * i);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* of = &x[i][j / 2][j % 2][2 * h];
          write_word(places.at(h, octet + j), pack<bf16>(of[0], of[1]));
        }
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < MATRIX_ELEMENTS / 8; i += THREADS) {
      u32 words[4];
      read_words(words, matrix + chunk_offset<ROW_BYTES>(i / OCTETS, i % OCTETS));
      store_words(to + i * 8, words);
    }
  }
};
