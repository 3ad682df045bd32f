//===- tile/math/ones_rows.cuh - A of products that write accumulators, sm_90a -----===//
//
// The tensor cores can write what sums start from: 64 rows alike, ones and zeros, times a matrix
// whose columns' first values are bf16 that add up to it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/block_shape.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

/// Each of a warpgroup's rows has a chunk of ones and zeros, three ones, and then one of zeros, for
/// the second half of k. The rows are alike, but all are there: of a stride of 0 bytes memcheck
/// knows nothing, and takes what lies behind one row for read.
struct OnesRows {
  static constexpr int BYTES = ONES_ROWS_BYTES, CHUNKS_BYTES = BYTES / 2;
  /// All threads of a block call this before fence_async_proxy() and a barrier.
  static __device__ __forceinline__ void write(u32 to) {
    for (int word = threadIdx.x; word < BYTES / 4; word += THREADS)
      write_word(to + word * 4, word >= CHUNKS_BYTES / 4 ? 0
                                : word % 4 == 0          ? pack<bf16>(1, 1)
                                : word % 4 == 1          ? pack<bf16>(1, 0)
                                                         : 0);
  }
  static __device__ __forceinline__ u64 descriptor(u32 at) {
    return matrix_descriptor<16, CHUNKS_BYTES>(at);
  }
};
/// B of columns whose values lie in 16 bytes each. Its second half of k meets zeros and may be
/// anything finite: what lies `SECOND_HALF` bytes behind, such as the first half again.
template <int SECOND_HALF = 0> __device__ __forceinline__ u64 columns_descriptor(u32 at) {
  return matrix_descriptor<16, SECOND_HALF>(at);
}
