//===- tile/walk/own_keys.cuh - Which keys a block owns ----------------------------===//
//
// A part of tile/walk/place.cuh: what the block's number in the grid says. Kernels that walk over
// lists of queries have tile/walk/own_keys_in_order.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/heads.cuh"

__device__ __forceinline__ KeyHead key_head(const Params& p) {
  return key_head(p, blockIdx.y / CHANNEL_PARTS, blockIdx.z);
}
/// Which block of keys this thread block takes; the same, read again (ptx/special.cuh).
__device__ __forceinline__ int block_of_keys(const Params&) {
  return PACKED ? packed_place().block : blockIdx.x;
}
__device__ __forceinline__ int reread_block_of_keys(const Params&) {
  return PACKED ? packed_place().block : read_block_x();
}
/// Whether the block has keys: it finds its sequence. A block that has none ends.
template <int SIZE> __device__ __forceinline__ bool enter_keys(const Params& p, int place) {
  if constexpr (PACKED)
    return enter_sequence<SIZE, false>(p, place);
  return true;
}
template <int SIZE> __device__ __forceinline__ bool enter_keys(const Params& p) {
  return enter_keys<SIZE>(p, blockIdx.x);
}
/// Reads it again at a kernel's end.
__device__ __forceinline__ KeyHead reread_key_head(const Params& p) {
  int kv_head, batch;
  read_block_yz(kv_head, batch);
  return key_head(p, kv_head / CHANNEL_PARTS, batch);
}
