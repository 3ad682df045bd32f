//===- tile/math/column_start.cuh - What columns of a product start from, sm_90a ----===//
//
// dP^T = V dO^T - delta: its columns are queries. As the tensor cores form V dO^T they can form
// -delta too, which takes an addition a score away: three bf16, whose sum is the FP32 value, times
// ones (ones_rows.cuh).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/ones_rows.cuh"
#include "tile/math/products.cuh"
#include "tile/memory/permutation.cuh"

struct ColumnStart {
  u64 ones;

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
      : ones(OnesRows::descriptor(ones_at)) {}
  /// Starts a product whose accumulators begin from the columns at `b`.
  template <typename Sum> __device__ __forceinline__ void issue(Sum (*s)[4], u32 b) const {
    wgmma_16<bf16>(s, ones, columns_descriptor(b), false);
  }
};
