//===- tile/query_walk.cuh - The queries of all heads that share keys -------===//
//
// Tiles of 64 queries of one head after the other, each from the first query that may see one of
// the keys. Within a head they come in runs, at whose edges the units of sums change.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/visible.cuh"

/// Tiles whose products are summed before the units change or, where there are none, the surplus
/// of the sums is taken off.
constexpr int TILES_A_RUN = 8;

/// The tile at which a walk stands.
struct QueryTile {
  int head;    ///< query head
  int in_head; ///< the tile's number in it
  u32 flat;    ///< the tile's number among those of the padded copies
  int run;     ///< the tile's run, modulo the slots

  /// What lies before the tile in a padded copy, and in the vectors of queries.
  __device__ __forceinline__ u64 elements() const {
    return static_cast<u64>(flat) * (TOKENS_PER_TILE * HEAD_DIM);
  }
  __device__ __forceinline__ u64 rows() const {
    return static_cast<u64>(flat) * (TOKENS_PER_TILE * ROW_VECTORS);
  }
};

/// The walk that some keys ask for. Something of each run lies in one of `SLOTS` slots.
template <int SLOTS> class QueryWalk {
public:
  __device__ __forceinline__ QueryWalk(const KeyHead& at, Range keys) {
    const Range queries = queries_of(at, keys);
    heads_end_ = (at.kv_head + 1) * at.heads;
    first_tile_ = queries.begin / TOKENS_PER_TILE;
    last_tile_ = ceil_div(queries.end, TOKENS_PER_TILE) - 1;
    turn_ = at.p.padded_q / TOKENS_PER_TILE - (last_tile_ - first_tile_);
  }
  /// Whether any query may see any of the keys.
  __device__ __forceinline__ bool seen() const { return first_tile_ <= last_tile_; }
  __device__ __forceinline__ QueryTile start(const KeyHead& at) const {
    const int head = at.kv_head * at.heads;
    const u32 before = static_cast<u32>(at.padded_query(head) / TOKENS_PER_TILE);
    return {seen() ? head : heads_end_, first_tile_, before + first_tile_, 0};
  }
  /// Not past the last head.
  __device__ __forceinline__ bool has(const QueryTile& tile) const {
    return tile.head < heads_end_;
  }
  __device__ __forceinline__ bool begins_run(const QueryTile& tile) const {
    return tile.in_head % TILES_A_RUN == 0 || tile.in_head == first_tile_;
  }
  __device__ __forceinline__ QueryTile next(QueryTile tile) const {
    const bool same_head = tile.in_head < last_tile_;
    tile.head += same_head ? 0 : 1;
    tile.in_head = same_head ? tile.in_head + 1 : first_tile_;
    tile.flat += same_head ? 1 : turn_;
    if (begins_run(tile))
      tile.run = tile.run + 1 < SLOTS ? tile.run + 1 : 0;
    return tile;
  }

private:
  int heads_end_, first_tile_, last_tile_;
  int turn_; ///< from the last tile of a head to the first of the next
};
