//===- tile/column_start.cuh - What columns of a product start from, sm_90a ----===//
//
// dP^T = V dO^T - delta: its columns are queries. As the tensor cores form V dO^T they can form
// -delta too, which takes an addition a score away: three bf16, whose sum is the FP32 value, times
// ones. B has one row of 16 bytes a query; its second half of k is the first again, and meets
// zeros.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/convert.cuh"
#include "ptx/shared_memory.cuh"
#include "tile/permutation.cuh"
#include "tile/products.cuh"

struct ColumnStart {
  static constexpr int BYTES = TOKENS_PER_TILE * 16; ///< of a tile's queries
  /// A: of each of a warpgroup's rows a chunk of ones and zeros, then of each one of zeros, for the
  /// second half of k. Its rows are alike, but all are there: of a stride of 0 bytes memcheck knows
  /// nothing, and takes what lies behind one row for read.
  static constexpr int CHUNKS_BYTES = 64 * 16, ONES_BYTES = 2 * CHUNKS_BYTES;
  u64 ones;

  /// By all threads of a block, before fence_async_proxy() and a barrier.
  static __device__ __forceinline__ void write_ones(u32 to) {
    for (int word = threadIdx.x; word < ONES_BYTES / 4; word += THREADS)
      write_word(to + word * 4, word >= CHUNKS_BYTES / 4 ? 0
                                : word % 4 == 0          ? pack<bf16>(1, 1)
                                : word % 4 == 1          ? pack<bf16>(1, 0)
                                                         : 0);
  }
  /// By a warp: B at `to` from the tile's vector, which lies in the order sigma. It then makes it
  /// known to the products.
  static __device__ __forceinline__ void write(u32 to, u32 vector) {
#pragma unroll
    for (int query = lane_id(); query < TOKENS_PER_TILE; query += 32) {
      const float x = read_float(vector + sigma_slot(query) * 4);
      const float high = unpack<bf16>(pack<bf16>(x, 0)).x;
      const float middle = unpack<bf16>(pack<bf16>(x - high, 0)).x;
      const u32 row[4] = {pack<bf16>(high, middle), pack<bf16>(x - high - middle, 0), 0, 0};
      write_words(to + query * 16, row);
    }
    fence_async_proxy();
  }
  __device__ __forceinline__ explicit ColumnStart(u32 ones_at)
      : ones(matrix_descriptor<16, CHUNKS_BYTES>(ones_at)) {}
  /// Starts a product whose accumulators begin from the columns at `b`.
  template <typename Sum> __device__ __forceinline__ void issue(Sum (*s)[4], u32 b) const {
    wgmma_16<bf16>(s, ones, matrix_descriptor<16, 0>(b), false);
  }
};
