//===- tile/math/products.cuh - What both families of products share -------------===//
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/math/dp_sums.cuh"
#include "tile/math/family.cuh"

/// Gives where the block's shared memory begins, of which its layout takes BYTES. The host launches
/// with as many, by the same layout of what the spec and the tile say.
template <int BYTES> __device__ __forceinline__ u32 shared_base() {
  static_assert(SHARED_BYTES == 0 || BYTES == SHARED_BYTES, "the host has another layout");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return static_cast<u32>(__cvta_generic_to_shared(shared_memory));
}

/// Starts copying rows of Q or K for S: the 8-bit copy, or under qk16 the tensor itself.
template <int ROWS>
__device__ __forceinline__ void load_score_rows(u32 tile, const s8* copy, const Element* tensor,
                                                s64 stride, int valid_rows, int channels) {
  if constexpr (QK16)
    load_tile<ROWS, SCORE_ROW_BYTES, THREADS>(tile, tensor, stride * 2, valid_rows, channels);
  else
    load_swizzled<ROWS * SCORE_ROW_BYTES>(tile, copy);
}

/// Starts copying rows of dO for dP: the copy of other magnitudes, or the tensor itself.
template <int ROWS>
__device__ __forceinline__ void load_dout_rows(u32 tile, const void* copy, const Element* tensor,
                                               s64 stride, int valid_rows, int channels) {
  if constexpr (SCALED_DOUT || DP16)
    load_swizzled<ROWS * VALUE_ROW_BYTES>(tile, copy);
  else
    load_tile<ROWS, VALUE_ROW_BYTES, THREADS>(tile, tensor, stride * 2, valid_rows, channels);
}

/// Waits for this block's copies into shared memory, and for its readers of what they replaced.
__device__ __forceinline__ void wait_for_tiles() {
  cp_async_wait<0>();
  publish_copies();
  __syncthreads();
}
