//===- tile/tile_stream.cuh - Dense tiles that a block copies one after the other --===//
//
// Each warp copies consecutive 512 bytes a turn: then all that a thread copies of a tile lies
// within the reach of the copies' immediate offsets, and one address serves it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/shared_tile.cuh"

/// Tiles of ROWS rows of ROW_BYTES each, at most 128.
template <int ROWS, int ROW_BYTES> struct TileStream {
  /// Starts copying the tile that lies `offset` bytes behind `source`. Only the sum of both, for
  /// the time of the copy, and `offset` take registers.
  static __device__ __forceinline__ void load(u32 tile, const void* source, s64 offset) {
    const int thread = copying_thread(), warp = thread / 32, lane = thread % 32;
    const int row = warp * (TURNS * ROWS_A_TURN) + lane / CHUNKS;
    constexpr int MIDDLE = TURNS * TURN_BYTES > REACH ? REACH : 0;
    offset += warp * (TURNS * TURN_BYTES) + lane * 16 + MIDDLE;
    asm("" : "+l"(offset)); // else sums with `source` are kept over a whole loop,
    const char* from = static_cast<const char*>(source) + offset;
    u32 to = tile + chunk_offset<ROW_BYTES>(row, lane % CHUNKS);
    asm("" : "+l"(from), "+r"(to)); // or formed anew for each copy
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      cp_async_16((to ^ swizzle_of(turn * ROWS_A_TURN) << 4) +
                      row_offset<ROW_BYTES>(turn * ROWS_A_TURN),
                  from + (turn * TURN_BYTES - MIDDLE));
  }

private:
  static constexpr int REACH = 2048; ///< immediate offsets are -REACH to REACH - 1
  static constexpr int CHUNKS = ROW_BYTES / 16, TURN_BYTES = 512;
  static constexpr int ROWS_A_TURN = TURN_BYTES / ROW_BYTES;
  static constexpr int TURNS = ROWS / (WARPS * ROWS_A_TURN);
  static_assert(ROW_BYTES <= 128 && TURNS * ROWS_A_TURN % 8 == 0 &&
                    TILE_ROWS % (TURNS * ROWS_A_TURN) == 0,
                "a warp's rows begin with a period of the swizzle, in one tile");
  /// The swizzle of rows that are so many further on: those of a turn differ in other bits of it.
  static __device__ __forceinline__ u32 swizzle_of(int rows) {
    return ROW_BYTES == 64 ? (rows >> 1) & 3 : rows & 7;
  }
};
