//===- tile/dq/fused_dq.cuh - dQ in 16 bits beside dK and dV, or nothing -------===//
//
// A block that owns keys does this for dQ with each tile of 64 queries (tile/dq/dq_sums.cuh). If
// WITH_DQ is false, all of it is nothing.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/dq/dq_sums.cuh"
#include "tile/memory/key_layout.cuh"
#include "tile/walk/place.cuh"

class FusedDq {
  static_assert(!WITH_DQ || DQ16, "kernels/backward_fused.cuh has INT8");

public:
  __device__ __forceinline__ explicit FusedDq(u32 base) : keys_(base), ds_(base + LAYOUT.ds) {}

  /// Starts copying what stays for the whole walk.
  __device__ __forceinline__ void load(const Params& p, const KeyHead& at, int first_key) const {
    if constexpr (WITH_DQ)
      load_swizzled<BLOCK_KV * VALUE_ROW_BYTES>(keys_, p.k_rows + (at.padded_key() + first_key) *
                                                                      HEAD_DIM);
  }
  /// dS^T of a tile, packed, goes to shared memory. A barrier follows.
  __device__ __forceinline__ void write(const u32 (&ds16)[4][4]) const {
    if constexpr (WITH_DQ)
      write_score_gradients(ds_, ds16);
  }
  /// dQ's part is added to the sums of the tile's queries. A barrier comes before the next write.
  __device__ __forceinline__ void add_to(float* sums) const {
    if constexpr (WITH_DQ)
      add_to_dq<BLOCK_KV>(sums, ds_, keys_);
  }

private:
  u32 keys_, ds_;
};
