//===- tile/memory/fragments.cuh - mma.sync operands from tiles in shared memory ---===//
#pragma once

#include "ptx/ldmatrix.cuh"
#include "tile/memory/shared_tile.cuh"

/// This lane's part of the address of an A fragment (16 rows x 32 bytes), to be added to a tile.
template <int ROW_BYTES> __device__ __forceinline__ u32 a_lane_offset() {
  const int lane = lane_id();
  return chunk_offset<ROW_BYTES>(lane & 15, lane >> 4);
}
/// Does so for two B fragments: 16 rows of the tile, which are 16 columns of B, x 32 bytes.
template <int ROW_BYTES> __device__ __forceinline__ u32 b_lane_offset() {
  const int lane = lane_id();
  return chunk_offset<ROW_BYTES>((lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1);
}
/// Fragment at `row` (a multiple of 16) and 32-byte step `step` of the tile that `lane_address`
/// (tile + lane offset) lies in. As B: columns 0-7 in r[0], r[1], columns 8-15 in r[2], r[3].
template <int ROW_BYTES>
__device__ __forceinline__ void load_fragment(u32 (&r)[4], u32 lane_address, int row, int step) {
  constexpr int STEPS_A_PANEL = PITCH<ROW_BYTES> / 32;
  ldmatrix_x4(r, (lane_address ^ (step % STEPS_A_PANEL << 5)) +
                     step / STEPS_A_PANEL * PANEL_BYTES<ROW_BYTES> + row_offset<ROW_BYTES>(row));
}
