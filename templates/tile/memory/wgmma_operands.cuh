//===- tile/memory/wgmma_operands.cuh - Operands in shared memory, sm_90a ----------===//
#pragma once

#include "ptx/wgmma.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/memory/shared_tile.cuh"

/// The address of tiles as wgmma's descriptors have it. Functions below that take it in the place
/// of an address need not make a descriptor of one.
struct TilesDescriptor {
  u32 low; ///< a descriptor's lower half
  __device__ __forceinline__ explicit TilesDescriptor(u32 address) : low(descriptor_low(address)) {}
  __device__ __forceinline__ TilesDescriptor operator+(int bytes) const {
    TilesDescriptor other = *this;
    other.low += bytes / 16;
    return other;
  }
  /// That of the stage of a ring whose stages take so many bytes.
  __device__ __forceinline__ TilesDescriptor at(int stage, int bytes) const {
    TilesDescriptor other = *this;
    other.low += stage * (bytes / 16);
    return other;
  }
};
template <int PITCH_BYTES> __device__ __forceinline__ u64 descriptor_of(u32 address) {
  return matrix_descriptor<PITCH_BYTES>(address);
}
template <int PITCH_BYTES>
__device__ __forceinline__ u64 descriptor_of(const TilesDescriptor& place) {
  return DESCRIPTOR_HIGH<PITCH_BYTES> << 32 | place.low;
}

/// The tile of 64 rows that this warpgroup's A operand is.
template <int ROW_BYTES> struct SharedRows {
  u32 tile;
  __device__ __forceinline__ void load(u32 tiles, int row) {
    tile = WARPS == 4 ? tiles : tiles + row / TILE_ROWS * (TILE_ROWS * ROW_BYTES);
  }
};
using ScoreRows = SharedRows<SCORE_ROW_BYTES>;
using ValueRows = SharedRows<VALUE_ROW_BYTES>;

/// Makes this thread's finished copies into shared memory visible to the products.
__device__ __forceinline__ void publish_copies() { fence_async_proxy(); }

/// From a tile's descriptor to that of 32 bytes along its rows.
template <int ROW_BYTES> __device__ __forceinline__ u64 advance(u64 descriptor, int step) {
  constexpr int STEPS_A_PANEL = PITCH<ROW_BYTES> / 32;
  return descriptor +
         (step / STEPS_A_PANEL * PANEL_BYTES<ROW_BYTES> + step % STEPS_A_PANEL * 32) / 16;
}
