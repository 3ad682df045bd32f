//===- tile/memory/stage_tile.cuh - Which tile of queries a stage of a ring holds ----===//
//
// A producer writes two words beside the bytes of a tile, because a walk of their own would cost
// the consumers registers. The words may belong to different rings: each is written behind the wait
// for its ring's readers and in front of the arrival that fills the stage.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/shared_memory.cuh"
#include "tile/walk/tiles.cuh"

struct StageTile {
  static constexpr int BYTES = 8;
  u32 place; ///< in shared memory

  __device__ __forceinline__ void write_in_head(const QueryTile& tile) const {
    write_word(place, tile.in_head);
  }
  __device__ __forceinline__ void write_flat(const QueryTile& tile) const {
    write_word(place + 4, tile.flat);
  }
  /// The tile's first query in its head. Only a mask needs it.
  __device__ __forceinline__ int first_query() const {
    return HAS_MASK ? read_word(place) * TOKENS_PER_TILE : 0;
  }
  /// The tile's number among those of the padded copies.
  __device__ __forceinline__ u32 flat() const { return read_word(place + 4); }
};
