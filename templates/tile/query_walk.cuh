//===- tile/query_walk.cuh - The queries of all heads that share keys -------===//
//
// Tiles of 64 queries of one head after the other, each from the first query that may see one of
// the keys. Within a head they come in runs, at whose edges the units of sums change.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/visible.cuh"

/// Whether sums are in units that differ from channel to channel, and from run to run.
constexpr bool CHANNEL_UNITS = !BLOCK_SCALES && !(DV16 && DK16);
/// Tiles whose products are summed before the units change, or the mean that smoothing takes off
/// their queries, or else the surplus of the sums is taken off.
constexpr int TILES_A_RUN = CHANNEL_UNITS || SMOOTH_Q ? CHANNEL_TOKENS_Q / TOKENS_PER_TILE : 8;

/// The tile at which a walk stands.
struct QueryTile {
  int head;    ///< query head
  int in_head; ///< the tile's number in it
  u32 flat;    ///< the tile's number among those of the padded copies

  /// What lies before the tile in a padded copy, and in the vectors of queries.
  __device__ __forceinline__ u64 elements() const {
    return static_cast<u64>(flat) * (TOKENS_PER_TILE * HEAD_DIM);
  }
  __device__ __forceinline__ u64 rows() const {
    return static_cast<u64>(flat) * (TOKENS_PER_TILE * ROW_VECTORS);
  }
};

/// The tiles of each head that some keys ask for: the first, and behind the last one.
__device__ __forceinline__ Range query_tiles_of(const Sequence& at, Range keys) {
  const Range queries = queries_of(at, keys);
  return {queries.begin / TOKENS_PER_TILE, ceil_div(queries.end, TOKENS_PER_TILE)};
}

/// The same walk as QueryWalk, run by run, each with one of `SLOTS` slots, in few registers: a tile
/// is known by its number `count` in the walk, and `tiles` are query_tiles_of() the keys, asked for
/// anew.
template <int SLOTS> struct RunWalk {
  int count = 0; ///< the tile at which it stands
  int end;       ///< of the run
  int shift;     ///< from a tile's count to its number in its head
  int slot = 0;  ///< of the run

  __device__ __forceinline__ explicit RunWalk(Range tiles) { begin_run(tiles, 0); }
  /// Past a run's end: whether there is another.
  __device__ __forceinline__ bool next_run(const KeyHead& at, Range tiles) {
    const int heads_done = count / (tiles.end - tiles.begin);
    slot = slot + 1 < SLOTS ? slot + 1 : 0;
    begin_run(tiles, heads_done);
    return heads_done * at.p.heads_kv < at.p.heads; // no division while products are under way
  }
  __device__ __forceinline__ int last_slot() const { return slot > 0 ? slot - 1 : SLOTS - 1; }

private:
  __device__ __forceinline__ void begin_run(Range tiles, int heads_done) {
    shift = tiles.begin - heads_done * (tiles.end - tiles.begin);
    const int in_head = count + shift;
    end = minimum((in_head / TILES_A_RUN + 1) * TILES_A_RUN, tiles.end) - shift;
  }
};

/// The walk that some keys ask for.
class QueryWalk {
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
  /// How many tiles it takes.
  __device__ __forceinline__ int tiles(const KeyHead& at) const {
    return seen() ? at.heads * (last_tile_ - first_tile_ + 1) : 0;
  }
  __device__ __forceinline__ QueryTile start(const KeyHead& at) const {
    const int head = at.kv_head * at.heads;
    const u32 before = static_cast<u32>(at.padded_query(head) / TOKENS_PER_TILE);
    return {seen() ? head : heads_end_, first_tile_, before + first_tile_};
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
    return tile;
  }
  /// The first tile of the run behind that of `tile`; where it lies among the copies is not said.
  __device__ __forceinline__ QueryTile next_run(QueryTile tile) const {
    tile.in_head = (tile.in_head / TILES_A_RUN + 1) * TILES_A_RUN;
    if (tile.in_head > last_tile_)
      tile.head += 1, tile.in_head = first_tile_;
    return tile;
  }

private:
  int heads_end_, first_tile_, last_tile_;
  int turn_; ///< from the last tile of a head to the first of the next
};
