//===- tile/products.cuh - What both families of products share -------------===//
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/accumulators.cuh"
#include "tile/dp_sums.cuh"
#include "tile/family.cuh"

/// Starts copying rows of Q or K for S: the 8-bit copy, or under qk16 the tensor itself.
template <int ROWS>
__device__ __forceinline__ void load_score_rows(u32 tile, const s8* copy, const Element* tensor,
                                                s64 stride, int valid_rows, int channels) {
  if constexpr (QK16)
    load_tile<ROWS, SCORE_ROW_BYTES, THREADS>(tile, tensor, stride * 2, valid_rows, channels);
  else
    load_image<ROWS * SCORE_ROW_BYTES>(tile, copy);
}

/// Starts copying rows of dO for dP: the copy of other magnitudes, or the tensor itself.
template <int ROWS>
__device__ __forceinline__ void load_dout_rows(u32 tile, const void* copy, const Element* tensor,
                                               s64 stride, int valid_rows, int channels) {
  if constexpr (SCALED_DOUT || DP16)
    load_image<ROWS * VALUE_ROW_BYTES>(tile, copy);
  else
    load_tile<ROWS, VALUE_ROW_BYTES, THREADS>(tile, tensor, stride * 2, valid_rows, channels);
}

/// Waits for this block's copies into shared memory, and for its readers of what they replaced.
__device__ __forceinline__ void wait_for_tiles() {
  cp_async_wait<0>();
  publish_copies();
  __syncthreads();
}
