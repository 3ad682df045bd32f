//===- tile/products.cuh - What both families of products share -------------===//
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/accumulators.cuh"
#include "tile/family.cuh"

/// Scores times the scales of their columns' tokens (in the order sigma); what is left is the
/// rows'.
template <int COLUMNS8>
__device__ __forceinline__ void scale_columns(float (&x)[COLUMNS8][4],
                                              const Scores::Sum (&sums)[COLUMNS8][4], u32 scales) {
#pragma unroll
  for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
    const float4 columns = QK16 ? float4{} : read_columns(scales, pair);
    const float scale[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[2 * pair + half][i] = Scores::scaled(sums[2 * pair + half][i], scale[2 * half + (i & 1)]);
    }
  }
}

/// Starts copying rows of Q or K for S: the 8-bit copy, or under qk16 the tensor itself.
template <int ROWS>
__device__ __forceinline__ void load_score_rows(u32 tile, const s8* copy, const Element* tensor,
                                                s64 stride, int valid_rows) {
  if constexpr (QK16)
    load_tile<ROWS, SCORE_ROW_BYTES, THREADS>(tile, tensor, stride * 2, valid_rows);
  else
    load_dense_tile<ROWS, SCORE_ROW_BYTES, THREADS>(tile, copy);
}

/// Waits for this block's copies into shared memory, and for its readers of what they replaced.
__device__ __forceinline__ void wait_for_tiles() {
  cp_async_wait<0>();
  publish_copies();
  __syncthreads();
}
