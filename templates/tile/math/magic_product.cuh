//===- tile/math/magic_product.cuh - INT8 scores that start from MAGIC, sm_90a ------===//
//
// As with mma.sync (magic_start.cuh): the bits of a score are then a float, and it takes no
// conversion, an instruction of half rate. wgmma adds to what is in its accumulators, and writing
// them would take as many instructions. So the tensor cores do: bf16 ones times bf16 MAGIC, as one
// step more of the product.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/ones_rows.cuh"

struct MagicProduct {
  /// The columns, then the ones, which are their second half of k as well: memcheck takes a first
  /// half that is read again for more than is there.
  static constexpr int COLUMNS_BYTES = MAGIC_COLUMNS_BYTES;
  u64 ones, columns;

  /// All threads of a block call this before fence_async_proxy() and a barrier.
  static __device__ __forceinline__ void write(u32 to) {
    if constexpr (SCORES_FROM_MAGIC) {
      for (int word = threadIdx.x; word < COLUMNS_BYTES / 4; word += THREADS)
        write_word(to + word * 4, word % 4 == 0 ? pack<bf16>(MAGIC, 0) : 0);
      OnesRows::write(to + COLUMNS_BYTES);
    }
  }
  __device__ __forceinline__ explicit MagicProduct(u32 at)
      : ones(OnesRows::descriptor(at + COLUMNS_BYTES)),
        columns(columns_descriptor<COLUMNS_BYTES>(at)) {}
  __device__ __forceinline__ void issue(int (*d)[4]) const {
    if constexpr (SCORES_FROM_MAGIC)
      wgmma_16<bf16>(d, ones, columns, false);
  }
  __device__ __forceinline__ void issue_wide(int (*d)[4]) const {
    if constexpr (SCORES_FROM_MAGIC)
      wgmma_16_wide<bf16>(d, ones, columns, false);
  }
};
/// Stands for it in kernels whose scores never do.
struct NoStart {
  __device__ __forceinline__ void issue(const void*) const {}
  __device__ __forceinline__ void issue_wide(const void*) const {}
};
