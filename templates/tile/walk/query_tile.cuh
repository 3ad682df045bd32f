//===- tile/walk/query_tile.cuh - A tile of queries, in a walk over tiles ---------===//
#pragma once

#include "tile/memory/block_shape.cuh"
#include "tile/walk/visible.cuh"

/// Whether sums are in units of channel scales, which differ from channel to channel and run to
/// run.
constexpr bool DKV_HAS_CHANNEL_SCALES = SHAPE.dkv_has_channel_scales;
/// The most tiles of a run: behind it sums are rescaled, or the mean that smoothing subtracts from
/// queries changes, or else their bias is subtracted.
constexpr int TILES_A_RUN =
    DKV_HAS_CHANNEL_SCALES || SMOOTH_Q ? CHANNEL_TOKENS_Q / TOKENS_PER_TILE : 8;

/// A tile of 64 queries.
struct QueryTile {
  int head;    ///< query head
  int in_head; ///< the tile's number in it
  u32 flat;    ///< the tile's number among those of the padded copies

  __device__ __forceinline__ int first_query() const { return in_head * TOKENS_PER_TILE; }
  /// The number of its run in its head; where sums are in channel scales, that of their scale
  /// block.
  __device__ __forceinline__ int run() const { return in_head / TILES_A_RUN; }
  /// Counts what lies before the tile in a padded copy, and in the vectors of queries.
  __device__ __forceinline__ u64 elements() const {
    return static_cast<u64>(flat) * (TOKENS_PER_TILE * HEAD_DIM);
  }
  __device__ __forceinline__ u64 rows() const {
    return static_cast<u64>(flat) * (TOKENS_PER_TILE * ROW_VECTORS);
  }
};

/// The tiles of each head whose queries see any of these keys.
__device__ __forceinline__ Range query_tiles_of(const Sequence& at, Range keys) {
  return tiles_of<TOKENS_PER_TILE>(queries_of(at, keys));
}
