//===- tile/memory/swizzle.cuh - Where the chunks of a tile lie ---------------------===//
//
// A tile is 64 rows of ROW_BYTES (64 to 512) in 16-byte chunks. Rows of 256 or 512 bytes are split
// into panels of 64 rows x 128 bytes. Chunk c of row r lies at c ^ f(r), so that the 8 rows of one
// ldmatrix matrix fall into 8 different bank groups: f(r) = r % 8, or (r / 2) % 4 for rows of 64
// bytes, two of which share a line. These are the 128- and 64-byte swizzles that wgmma reads.
// Copies that a pre-pass writes lie so in global memory already, as swizzled tiles, so that
// bringing one is copying consecutive bytes. In shared memory tiles start at multiples of 1024
// bytes, hence a step of 32 bytes along a row is an XOR of the address.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

constexpr int TILE_ROWS = 64;

/// Bytes from one row of a panel to the next, and of a panel.
template <int ROW_BYTES> constexpr int PITCH = ROW_BYTES < 128 ? ROW_BYTES : 128;
template <int ROW_BYTES> constexpr int PANEL_BYTES = TILE_ROWS* PITCH<ROW_BYTES>;
template <int ROW_BYTES> constexpr int CHUNKS_A_PANEL = PITCH<ROW_BYTES> / 16;

/// The place of a row in tiles that lie one after the other.
template <int ROW_BYTES> __device__ __forceinline__ u32 row_offset(int row) {
  return row / TILE_ROWS * (TILE_ROWS * ROW_BYTES) + row % TILE_ROWS * PITCH<ROW_BYTES>;
}
template <int ROW_BYTES> __device__ __forceinline__ u32 chunk_offset(int row, int chunk) {
  const int swizzle = ROW_BYTES == 64 ? (row >> 1) & 3 : row & 7;
  const int panel = chunk / CHUNKS_A_PANEL<ROW_BYTES>, place = chunk % CHUNKS_A_PANEL<ROW_BYTES>;
  return row_offset<ROW_BYTES>(row) + panel * PANEL_BYTES<ROW_BYTES> + ((place ^ swizzle) << 4);
}
