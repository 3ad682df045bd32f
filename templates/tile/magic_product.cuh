//===- tile/magic_product.cuh - INT8 scores that start from MAGIC, sm_90a ------===//
//
// As with mma.sync (magic_start.cuh): the bits of a score are then a float, and it takes no
// conversion, an instruction of half rate. wgmma adds to what is in its accumulators, and writing
// them would take as many instructions. So the tensor cores do: bf16 ones times bf16 MAGIC, as one
// step more of the product.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/ones_rows.cuh"

struct MagicProduct {
  static constexpr int COLUMNS_BYTES = 128 * 16; ///< as many as the widest product has
  static constexpr int BYTES = SCORES_FROM_MAGIC ? OnesRows::BYTES + COLUMNS_BYTES : 0;
  u64 ones, columns;

  /// By all threads of a block, before fence_async_proxy() and a barrier.
  static __device__ __forceinline__ void write(u32 to) {
    if constexpr (SCORES_FROM_MAGIC) {
      OnesRows::write(to);
      for (int word = threadIdx.x; word < COLUMNS_BYTES / 4; word += THREADS)
        write_word(to + OnesRows::BYTES + word * 4, word % 4 == 0 ? pack<bf16>(MAGIC, 0) : 0);
    }
  }
  __device__ __forceinline__ explicit MagicProduct(u32 at)
      : ones(OnesRows::descriptor(at)), columns(columns_descriptor(at + OnesRows::BYTES)) {}
  __device__ __forceinline__ void issue(int (*d)[4]) const {
    if constexpr (SCORES_FROM_MAGIC)
      wgmma_16<bf16>(d, ones, columns, false);
  }
  __device__ __forceinline__ void issue_wide(int (*d)[4]) const {
    if constexpr (SCORES_FROM_MAGIC)
      wgmma_16_wide<bf16>(d, ones, columns, false);
  }
};
/// Of kernels that never do.
struct NoStart {
  __device__ __forceinline__ void issue(const void*) const {}
  __device__ __forceinline__ void issue_wide(const void*) const {}
};
