//===- tile/walk/tiles.cuh - The tiles that a block walks over --------------------===//
//
// This file alone knows where the tiles of a walk lie, in which order they come, which of them need
// a mask, where a run of them begins, and where the walk ends. Kernels ask it and compute nothing
// of this themselves. There are two kinds of walk:
//
//   over the keys that a block of queries sees (O, dQ):   KeyTiles, in ascending order
//                                                         ConsumedKeyTiles, the same, few registers
//                                                         KeyTilesMaskedFirst, another order
//   over the queries that see a block of keys (dK, dV),   QueryTiles with QueryTile
//   all heads of a group one after the other:             QueryRuns, the same, few registers
//
// A run is a sequence of tiles whose products are summed without a change: at the first tile of a
// run all sums are rescaled to other scales of channels, or their bias is subtracted. Kernels for
// lists of blocks have tile/walk/listed_tiles.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/query_tile.cuh"

//===- Keys --------------------------------------------------------------------===//

/// A walk over tiles of SIZE keys in ascending order, and the tile at which it stands. A run has
/// RUN tiles; walks begin and end within runs.
template <int SIZE, int RUN> struct KeyTiles {
  int number;     ///< the tile's, in its sequence
  int begin, end; ///< the walk's first tile, and the one behind its last

  __device__ __forceinline__ KeyTiles(int number, int begin, int end)
      : number(number), begin(begin), end(end) {}
  /// The walk over all keys that any of these queries sees, at its first tile.
  __device__ __forceinline__ KeyTiles(const Sequence& at, Range queries) {
    const Range tiles = tiles_of<SIZE>(keys_of(at, queries));
    number = begin = tiles.begin;
    end = tiles.end;
  }

  /// Whether it stands at a tile, not behind the last one.
  __device__ __forceinline__ bool more() const { return number < end; }
  /// Whether the walk has any tile. The first one exists in any case (keys_of()).
  __device__ __forceinline__ bool any() const { return end > 0; }
  __device__ __forceinline__ KeyTiles next() const { return {number + 1, begin, end}; }
  /// How many tiles come before this one: its stage in a ring follows from it.
  __device__ __forceinline__ int count() const { return number - begin; }
  __device__ __forceinline__ int first_key() const { return number * SIZE; }

  /// The number of the tile's run in its sequence; where sums are in channel scales, that of their
  /// scale block.
  __device__ __forceinline__ int run() const { return number / RUN; }
  __device__ __forceinline__ bool begins_run() const {
    return number % RUN == 0 || number == begin;
  }
  /// Whether it begins a run behind another one.
  __device__ __forceinline__ bool changes_run() const { return number % RUN == 0 && count() > 0; }
  /// The run behind this one, and whether the walk has it.
  __device__ __forceinline__ int next_run() const { return run() + 1; }
  __device__ __forceinline__ bool has_run(int next) const { return next * RUN < end; }
  /// Which of BUFFERS in shared memory has the scales of this run, of the one before it, of the one
  /// behind it, and of the walk's last one.
  template <int BUFFERS> __device__ __forceinline__ int buffer() const {
    return buffer_of<BUFFERS>(run());
  }
  template <int BUFFERS> __device__ __forceinline__ int buffer_before() const {
    return buffer_of<BUFFERS>(run() - 1);
  }
  template <int BUFFERS> __device__ __forceinline__ int buffer_behind() const {
    return buffer_of<BUFFERS>(run() + 1);
  }
  template <int BUFFERS> __device__ __forceinline__ int last_buffer() const {
    return buffer_of<BUFFERS>(maximum(0, end - 1) / RUN);
  }

  /// The tiles that need no mask for these queries.
  static __device__ __forceinline__ Range unmasked(const Sequence& at, Range queries) {
    return unmasked_tiles_of<SIZE>(at, queries);
  }
  __device__ __forceinline__ bool is_in(Range tiles) const {
    return number >= tiles.begin && number < tiles.end;
  }
  /// Says where its run or these tiles end, whichever comes first: the count() of the tile behind.
  __device__ __forceinline__ int end_of_run_in(Range tiles) const {
    return minimum(tiles.end, (run() + 1) * RUN) - begin;
  }

private:
  template <int BUFFERS> static __device__ __forceinline__ int buffer_of(int run) {
    return static_cast<u32>(run) % BUFFERS;
  }
};

/// A warpgroup that takes its tiles from a ring has the same walk. The ring has the tiles of all
/// the block's queries, `BLOCK()`; the warpgroup works on those that its own queries, `OWN()`, see.
/// Its state is one number, and everything else is computed where it is needed: registers are
/// short. A walk over lists is known by the producer's messages (tile/walk/tile_messages.cuh).
template <int SIZE, int RUN, typename Block, typename Own, typename MessageAt>
class ConsumedKeyTiles {
public:
  using Tile = KeyTiles<SIZE, RUN>;

  __device__ __forceinline__ ConsumedKeyTiles(const Sequence& at, Block block, Own own,
                                              const MessageAt&, int)
      : at_(at), block_(block), own_(own) {}

  /// The tile at which it stands, in a walk that ends with the warpgroup's own tiles.
  __device__ __forceinline__ Tile tile() const {
    const int tile = number();
    return {tile, tile - count_, ceil_div(opaque(keys_of(at_, own_()).end), SIZE)};
  }
  __device__ __forceinline__ int number() const {
    return WINDOW ? count_ + tiles_of<SIZE>(keys_of(at_, block_())).begin : count_;
  }
  /// Whether the ring has a tile here, be it one that only other warpgroups see.
  __device__ __forceinline__ bool is_in_ring() const {
    return number() < ceil_div(keys_of(at_, block_()).end, SIZE);
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ void advance() { ++count_; }
  __device__ __forceinline__ Range unmasked() const { return Tile::unmasked(at_, own_()); }
  /// Behind the warpgroup's last tile this is the buffer of its run (KeyTiles::last_buffer()).
  template <int BUFFERS> __device__ __forceinline__ int last_buffer() const {
    return Tile(0, 0, number()).template last_buffer<BUFFERS>();
  }

private:
  const Sequence& at_;
  Block block_;
  Own own_;
  int count_ = 0;
};

/// A walk over tiles of SIZE keys in the order of dQ: first those that need a mask, which are the
/// last ones and the first, then the others. So each of the two loops is one piece, and the tiles
/// are those from one on, in ascending order, where behind the last one the first one comes. A run
/// has RUN tiles.
template <int SIZE, int RUN> class KeyTilesMaskedFirst {
public:
  __device__ __forceinline__ KeyTilesMaskedFirst(const Sequence& at, Range queries) {
    const Range all = tiles_of<SIZE>(keys_of(at, queries));
    const Range full = unmasked_tiles_of<SIZE>(at, queries);
    end_ = all.end, begin_ = all.begin;
    const int full_end = minimum(end_, maximum(begin(), full.end));
    left_ = end_ - begin();
    number_ = full_end == end_ ? begin() : full_end;
    unmasked_ = maximum(0, full_end - full.begin);
  }

  /// How many tiles are left, this one included.
  __device__ __forceinline__ int left() const { return left_; }
  __device__ __forceinline__ bool needs_mask() const { return left_ > unmasked_; }
  __device__ __forceinline__ void advance() {
    number_ = next();
    --left_;
  }
  /// How many tiles come before this one.
  __device__ __forceinline__ int count() const { return end_ - begin() - left_; }
  /// The number in its sequence of this tile, of the next one and of the one before.
  __device__ __forceinline__ int number() const { return number_; }
  __device__ __forceinline__ int next() const {
    return number_ + 1 == end_ ? begin() : number_ + 1;
  }
  __device__ __forceinline__ int previous() const {
    return number_ > begin() ? number_ - 1 : maximum(end_ - 1, begin());
  }
  __device__ __forceinline__ int first_key() const { return number_ * SIZE; }
  /// The number of a tile's run in its sequence; where sums are in channel scales, that of their
  /// scale block.
  static __device__ __forceinline__ int run_of(int tile) { return tile / RUN; }
  /// Whether the tile begins a run: the first one does, which the last one precedes.
  __device__ __forceinline__ bool begins_run() const {
    return number_ % RUN == 0 || (WINDOW && number_ == begin_);
  }

private:
  __device__ __forceinline__ int begin() const { return WINDOW ? begin_ : 0; }

  int number_, end_, left_;
  int unmasked_; ///< the last so many tiles of the walk
  int begin_;
};

//===- Queries -----------------------------------------------------------------===//

/// The walk over the queries that see some keys: the same tiles of each head of the group.
class QueryTiles {
public:
  __device__ __forceinline__ QueryTiles(const KeyHead& at, Range keys) {
    const Range queries = queries_of(at, keys);
    heads_end_ = (at.kv_head + 1) * at.heads;
    first_tile_ = queries.begin / TOKENS_PER_TILE;
    last_tile_ = ceil_div(queries.end, TOKENS_PER_TILE) - 1;
    to_next_head_ = at.p.padded_q / TOKENS_PER_TILE - (last_tile_ - first_tile_);
  }
  /// Whether any query sees any of the keys.
  __device__ __forceinline__ bool any() const { return first_tile_ <= last_tile_; }
  /// How many tiles the walk has.
  __device__ __forceinline__ int tiles(const KeyHead& at) const {
    return any() ? at.heads * (last_tile_ - first_tile_ + 1) : 0;
  }
  __device__ __forceinline__ QueryTile start(const KeyHead& at) const {
    const int head = at.kv_head * at.heads;
    const u32 before = static_cast<u32>(at.padded_query(head) / TOKENS_PER_TILE);
    return {any() ? head : heads_end_, first_tile_, before + first_tile_};
  }
  /// Whether it is a tile of the walk, not behind the last head.
  __device__ __forceinline__ bool has(const QueryTile& tile) const {
    return tile.head < heads_end_;
  }
  /// Whether a tile is the walk's first one of its head or of a group of so many.
  template <int TILES> __device__ __forceinline__ bool begins(const QueryTile& tile) const {
    return tile.in_head % TILES == 0 || tile.in_head == first_tile_;
  }
  __device__ __forceinline__ bool begins_run(const QueryTile& tile) const {
    return begins<TILES_A_RUN>(tile);
  }
  __device__ __forceinline__ QueryTile next(QueryTile tile) const {
    const bool same_head = tile.in_head < last_tile_;
    tile.head += same_head ? 0 : 1;
    tile.in_head = same_head ? tile.in_head + 1 : first_tile_;
    tile.flat += same_head ? 1 : to_next_head_;
    return tile;
  }
  /// The first tile of the run behind that of `tile`, without its `flat`.
  __device__ __forceinline__ QueryTile next_run(QueryTile tile) const {
    tile.in_head = (tile.in_head / TILES_A_RUN + 1) * TILES_A_RUN;
    if (tile.in_head > last_tile_)
      tile.head += 1, tile.in_head = first_tile_;
    return tile;
  }
  /// The other tile of the pair that begins with `tile`: the next one of the same run, or, where
  /// there is none, `tile` again.
  __device__ __forceinline__ QueryTile second_of_pair(const QueryTile& tile) const {
    const QueryTile following = next(tile);
    return has(following) && !begins_run(following) ? following : tile;
  }

private:
  int heads_end_, first_tile_, last_tile_;
  /// From the last tile of a head to the first one of the next, among the tiles of the copies.
  int to_next_head_;
};

/// A block of BLOCK_KV keys that takes its tiles from a ring, run by run, has the same walk. The
/// scales of each run are in the next of BUFFERS buffers. A tile is known by its number in the
/// walk; which tiles of a head there are is computed where it is needed: registers are short.
template <int BUFFERS> class QueryRuns {
public:
  __device__ __forceinline__ explicit QueryRuns(const Sequence& at) { begin_run(tiles(at), 0); }

  static __device__ __forceinline__ bool any(const Sequence& at) {
    const Range seen = tiles(at);
    return seen.begin < seen.end;
  }
  /// How many tiles come before the one at which it stands.
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ bool is_in_run() const { return count_ < end_; }
  __device__ __forceinline__ void advance() { ++count_; }
  /// Gives that of the tile, or of the one that many behind it.
  __device__ __forceinline__ int first_query(int behind = 0) const {
    return (count_ + behind + shift_) * TOKENS_PER_TILE;
  }
  /// The query head of the tile.
  __device__ __forceinline__ int head(const KeyHead& at) const {
    return at.kv_head * at.heads + heads_done_;
  }
  /// Two tiles at a time (QueryTiles::second_of_pair()): whether there is no second one.
  __device__ __forceinline__ bool comes_again(int of_pair) const {
    return count_ + of_pair >= end_;
  }
  __device__ __forceinline__ void advance_pair() { count_ = minimum(count_ + 2, end_); }
  /// Behind a run's last tile: goes to the next run, and says whether there is one.
  __device__ __forceinline__ bool next_run(const KeyHead& at) {
    const Range all = tiles(at);
    const int heads_done = count_ / (all.end - all.begin);
    buffer_ = buffer_ + 1 < BUFFERS ? buffer_ + 1 : 0;
    begin_run(all, heads_done);
    return heads_done * at.p.heads_kv < at.p.heads; // no division while products are under way
  }
  /// Gives the buffer of the run's scales, and of those of the run before.
  __device__ __forceinline__ int buffer() const { return buffer_; }
  __device__ __forceinline__ int last_buffer() const {
    return buffer_ > 0 ? buffer_ - 1 : BUFFERS - 1;
  }

private:
  static __device__ __forceinline__ Range tiles(const Sequence& at) {
    return query_tiles_of(at, tokens_from(reread_block_of_keys(at.p) * BLOCK_KV, BLOCK_KV));
  }
  __device__ __forceinline__ void begin_run(Range tiles, int heads_done) {
    heads_done_ = heads_done;
    shift_ = tiles.begin - heads_done * (tiles.end - tiles.begin);
    const int in_head = count_ + shift_;
    end_ = minimum((in_head / TILES_A_RUN + 1) * TILES_A_RUN, tiles.end) - shift_;
  }

  int count_ = 0;
  int end_;   ///< of the run
  int shift_; ///< from a tile's count to its number in its head
  int heads_done_;
  int buffer_ = 0;
};

/// Consumers have the same walk. A walk over lists is known by the producer's messages
/// (tile/walk/tile_messages.cuh): that of the tile at which it stands, and then that of the next
/// one, which it has met.
template <int BUFFERS, typename MessageAt> struct ConsumedQueryRuns : QueryRuns<BUFFERS> {
  __device__ __forceinline__ ConsumedQueryRuns(const Sequence& at, const MessageAt&)
      : QueryRuns<BUFFERS>(at) {}
  __device__ __forceinline__ void meet(int) {}
  /// Whether some scores of its tile are hidden.
  __device__ __forceinline__ bool hides_part() const { return false; }
  static __device__ __forceinline__ int tiles(const KeyHead& at, Range keys) {
    return QueryTiles(at, keys).tiles(at);
  }
};
