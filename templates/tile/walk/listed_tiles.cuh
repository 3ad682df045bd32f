//===- tile/walk/listed_tiles.cuh - The tiles that a block walks over, from lists --===//
//
// The walks of tile/walk/tiles.cuh, with the same members, over the tiles that are in lists of
// blocks. Tiles come in the same order, and runs are parts of the same runs: where every block is
// listed, results have the same bits.
//
// Words of lists are read again at every step: one serves 32 blocks, and is near.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/lists.cuh"
#include "tile/walk/query_tile.cuh"
#include "tile/walk/tile_messages.cuh"

//===- Keys --------------------------------------------------------------------===//

template <int SIZE, int RUN> struct KeyTiles {
  int number, end;
  int following; ///< the next tile's number, known a step ahead; see operator=
  KeyList list;
  int before = 0;  ///< tiles before this one
  int changes = 0; ///< runs before its own

  __device__ __forceinline__ KeyTiles(const QueryHead& at, Range queries)
      : list(at, queries.begin) {
    end = tiles_of<SIZE>(keys_of(at, queries)).end;
    number = list.first<SIZE>(0, end);
    if (number == end) // an empty walk is at a tile that exists
      number = end = 0;
    following = list.first<SIZE>(number + 1, end);
  }

  __device__ __forceinline__ KeyTiles(const KeyTiles&) = default;
  /// When a walk goes on, `tile = tile.next()`, it looks for the tile behind: once a step, however
  /// often next() is asked.
  __device__ __forceinline__ KeyTiles& operator=(const KeyTiles& tile) {
    number = tile.number, end = tile.end, list = tile.list;
    before = tile.before, changes = tile.changes;
    following = tile.following == UNKNOWN ? list.first<SIZE>(number + 1, end) : tile.following;
    return *this;
  }

  __device__ __forceinline__ bool more() const { return number < end; }
  __device__ __forceinline__ bool any() const { return end > 0; }
  __device__ __forceinline__ KeyTiles next() const {
    KeyTiles tile = *this;
    tile.number = following;
    tile.following = UNKNOWN;
    ++tile.before;
    tile.changes += tile.more() && tile.run() != run();
    return tile;
  }
  __device__ __forceinline__ int count() const { return before; }
  __device__ __forceinline__ int first_key() const { return number * SIZE; }

  __device__ __forceinline__ int run() const { return number / RUN; }
  __device__ __forceinline__ bool begins_run() const {
    return list.first<SIZE>(run() * RUN, number) == number;
  }
  __device__ __forceinline__ bool changes_run() const { return before > 0 && begins_run(); }
  __device__ __forceinline__ int next_run() const {
    const int tile = list.first<SIZE>((run() + 1) * RUN, end);
    return tile < end ? tile / RUN : ceil_div(end, RUN);
  }
  __device__ __forceinline__ bool has_run(int next) const { return next * RUN < end; }
  template <int BUFFERS> __device__ __forceinline__ int buffer() const {
    return buffer_of<BUFFERS>(0);
  }
  template <int BUFFERS> __device__ __forceinline__ int buffer_before() const {
    return buffer_of<BUFFERS>(-1);
  }
  template <int BUFFERS> __device__ __forceinline__ int buffer_behind() const {
    return buffer_of<BUFFERS>(1);
  }
  template <int BUFFERS> __device__ __forceinline__ int last_buffer() const {
    return buffer_of<BUFFERS>(0);
  }

  static __device__ __forceinline__ Range unmasked(const Sequence& at, Range queries) {
    return unmasked_tiles_of<SIZE>(at, queries);
  }
  __device__ __forceinline__ bool is_in(Range tiles) const {
    if constexpr (HIDES_ANYWHERE) {
      if (list.hides_part<SIZE>(number))
        return false;
    }
    return number >= tiles.begin && number < tiles.end;
  }
  __device__ __forceinline__ int end_of_run_in(Range tiles) const {
    if constexpr (HIDES_ANYWHERE) // each tile is asked for
      return 0;
    const int last = minimum(minimum(tiles.end, end), (run() + 1) * RUN);
    int count = before;
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      count += number + i < last && list.has<SIZE>(number + i);
    return count;
  }

private:
  static constexpr int UNKNOWN = -1;
  template <int BUFFERS> __device__ __forceinline__ int buffer_of(int further) const {
    return static_cast<u32>(changes + further) % BUFFERS;
  }
};

/// It reads messages in a ring: `message_at(count)` waits for that tile's, and gives its address.
/// The walk's first tile is number `count` of the ring.
template <int SIZE, int RUN, typename Block, typename Own, typename MessageAt>
class ConsumedKeyTiles {
public:
  __device__ __forceinline__ ConsumedKeyTiles(const Sequence& at, Block, Own own,
                                              const MessageAt& message_at, int count)
      : at_(at), own_(own), message_at_(message_at), count_(count), message_(message_at(count)) {}

  __device__ __forceinline__ const ConsumedKeyTiles& tile() const { return *this; }
  __device__ __forceinline__ bool more() const {
    return is_in_ring() && (!CAUSAL || number() * SIZE < opaque(keys_of(at_, own_()).end));
  }
  __device__ __forceinline__ bool is_in_ring() const { return !message_.ends(); }
  __device__ __forceinline__ int number() const { return message_.number(); }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int first_key() const { return number() * SIZE; }
  __device__ __forceinline__ void advance() { message_ = TileMessage(message_at_(++count_)); }
  __device__ __forceinline__ bool changes_run() const { return message_.begins_run(); }
  __device__ __forceinline__ Range unmasked() const {
    return KeyTiles<SIZE, RUN>::unmasked(at_, own_());
  }
  __device__ __forceinline__ bool is_in(Range tiles) const {
    if constexpr (HIDES_ANYWHERE) {
      if (message_.hides_part())
        return false;
    }
    return number() >= tiles.begin && number() < tiles.end;
  }
  /// Each tile is asked for.
  __device__ __forceinline__ int end_of_run_in(Range) const { return 0; }
  template <int BUFFERS> __device__ __forceinline__ int buffer() const { return message_.buffer(); }
  template <int BUFFERS> __device__ __forceinline__ int buffer_before() const {
    return message_.buffer_before<BUFFERS>();
  }
  template <int BUFFERS> __device__ __forceinline__ int last_buffer() const {
    return changes_run() ? buffer_before<BUFFERS>() : buffer<BUFFERS>();
  }

private:
  const Sequence& at_;
  Own own_;
  const MessageAt& message_at_;
  int count_;
  TileMessage message_;
};

template <int SIZE, int RUN> class KeyTilesMaskedFirst {
public:
  __device__ __forceinline__ KeyTilesMaskedFirst(const QueryHead& at, Range queries)
      : list_(at, queries.begin) {
    end_ = tiles_of<SIZE>(keys_of(at, queries)).end;
    full_end_ = minimum(end_, maximum(0, unmasked_tiles_of<SIZE>(at, queries).end));
    start_ = cyclic(full_end_);
    left_ = start_ == end_ ? 0 : 2;
    number_ = previous_ = left_ ? start_ : 0; // an empty walk is at a tile that exists
    find_next();
  }

  /// How many tiles are left, this one included; more than two count as two.
  __device__ __forceinline__ int left() const { return left_; }
  /// Any tile may where any score may be hidden.
  __device__ __forceinline__ bool needs_mask() const {
    if constexpr (HIDES_ANYWHERE) {
      if (list_.hides_part<SIZE>(number_))
        return left_ > 0;
    }
    return left_ > 0 && number_ >= full_end_;
  }
  __device__ __forceinline__ void advance() {
    previous_ = number_;
    number_ = next_;
    ++count_;
    left_ -= left_ == 1;
    find_next();
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int number() const { return number_; }
  __device__ __forceinline__ int next() const { return next_; }
  __device__ __forceinline__ int previous() const { return previous_; }
  __device__ __forceinline__ int first_key() const { return number_ * SIZE; }
  static __device__ __forceinline__ int run_of(int tile) { return tile / RUN; }
  __device__ __forceinline__ bool begins_run() const {
    return run_of(number_) != run_of(previous_) || number_ < previous_;
  }

private:
  /// The first listed tile from this one on, and behind the last one the first; or else end_.
  __device__ __forceinline__ int cyclic(int tile) const {
    const int found = list_.first<SIZE>(tile, end_);
    return found < end_ ? found : list_.first<SIZE>(0, end_);
  }
  __device__ __forceinline__ void find_next() {
    if (left_ == 0)
      return;
    next_ = cyclic(number_ + 1);
    if (next_ == start_)
      left_ = 1;
  }

  KeyList list_;
  int number_, next_ = 0, previous_, start_, end_, left_, count_ = 0;
  int full_end_; ///< tiles from here on need a mask
};

//===- Queries -----------------------------------------------------------------===//

class QueryTiles {
public:
  __device__ __forceinline__ QueryTiles(const KeyHead& at, Range keys) : lists_(at, keys.begin) {
    const Range tiles = query_tiles_of(at, keys);
    heads_end_ = (at.kv_head + 1) * at.heads;
    first_ = tiles.begin, end_ = tiles.end;
    tiles_a_head_ = at.p.padded_q / TOKENS_PER_TILE;
    any_ = has(start(at)); // where nobody asks, nothing is computed
  }
  __device__ __forceinline__ bool any() const { return any_; }
  __device__ __forceinline__ QueryTile start(const KeyHead& at) const {
    const int head = at.kv_head * at.heads;
    const u32 before = static_cast<u32>(at.padded_query(head) / TOKENS_PER_TILE);
    return listed({head, first_, before + first_});
  }
  __device__ __forceinline__ bool has(const QueryTile& tile) const {
    return tile.head < heads_end_;
  }
  template <int TILES> __device__ __forceinline__ bool begins(const QueryTile& tile) const {
    const int first = maximum(first_, tile.in_head / TILES * TILES);
    return lists_.first(tile.head, first, tile.in_head) == tile.in_head;
  }
  __device__ __forceinline__ bool begins_run(const QueryTile& tile) const {
    return begins<TILES_A_RUN>(tile);
  }
  __device__ __forceinline__ QueryTile next(QueryTile tile) const {
    ++tile.in_head, ++tile.flat;
    return listed(tile);
  }
  __device__ __forceinline__ QueryTile next_run(QueryTile tile) const {
    tile.in_head = (tile.in_head / TILES_A_RUN + 1) * TILES_A_RUN;
    return listed(tile);
  }

private:
  /// The first listed tile from this one on, of this head or the next ones.
  __device__ __forceinline__ QueryTile listed(QueryTile tile) const {
    while (has(tile)) {
      const int found = lists_.first(tile.head, tile.in_head, end_);
      if (found < end_) {
        tile.flat += found - tile.in_head, tile.in_head = found;
        break;
      }
      tile.flat += tiles_a_head_ + first_ - tile.in_head, tile.in_head = first_;
      ++tile.head;
    }
    return tile;
  }

  QueryLists lists_;
  int heads_end_, first_, end_, tiles_a_head_;
  bool any_;
};

template <int BUFFERS> class QueryRuns {
public:
  __device__ __forceinline__ explicit QueryRuns(const KeyHead& at)
      : p_(at.p), tile_(tiles().start(at)) {}

  __device__ __forceinline__ bool any(const KeyHead&) const { return tiles().has(tile_); }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ bool is_in_run() const { return in_run_; }
  __device__ __forceinline__ void advance() {
    const QueryTile next = tiles().next(tile_);
    in_run_ = next.head == tile_.head && next.run() == tile_.run();
    tile_ = next;
    ++count_;
  }
  __device__ __forceinline__ int first_query() const { return tile_.first_query(); }
  __device__ __forceinline__ bool next_run(const KeyHead&) {
    buffer_ = buffer_ + 1 < BUFFERS ? buffer_ + 1 : 0;
    return tiles().has(tile_);
  }
  __device__ __forceinline__ int buffer() const { return buffer_; }
  __device__ __forceinline__ int last_buffer() const {
    return buffer_ > 0 ? buffer_ - 1 : BUFFERS - 1;
  }

private:
  /// Formed where it is needed: registers are short.
  __device__ __forceinline__ QueryTiles tiles() const {
    return QueryTiles(reread_key_head(p_),
                      tokens_from(reread_block_of_keys(p_) * BLOCK_KV, BLOCK_KV));
  }

  const Params& p_;
  QueryTile tile_;
  int count_ = 0, buffer_ = 0;
  bool in_run_ = false;
};

/// It reads messages: `message_at(count)` is the address of a tile's, once the tile is there.
template <int BUFFERS, typename MessageAt> class ConsumedQueryRuns {
public:
  __device__ __forceinline__ ConsumedQueryRuns(const Sequence&, const MessageAt& message_at)
      : message_at_(message_at) {}

  /// Their number is unknown: a message says where they end.
  static __device__ __forceinline__ int tiles(const KeyHead&, Range) { return 0; }
  __device__ __forceinline__ void meet(int count) { message_ = TileMessage(message_at_(count)); }
  __device__ __forceinline__ bool any(const Sequence&) const { return !message_.ends(); }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ bool is_in_run() const { return !message_.begins_run(); }
  __device__ __forceinline__ bool hides_part() const { return message_.hides_part(); }
  __device__ __forceinline__ void advance() { ++count_; }
  __device__ __forceinline__ int first_query() const { return message_.number() * TOKENS_PER_TILE; }
  /// Any of them: messages do not say which (tiling_of_dkv_ws()).
  __device__ __forceinline__ int head(const KeyHead& at) const { return at.kv_head * at.heads; }
  __device__ __forceinline__ bool next_run(const Sequence&) const { return !message_.ends(); }
  __device__ __forceinline__ int buffer() const { return message_.buffer(); }
  __device__ __forceinline__ int last_buffer() const { return message_.buffer_before<BUFFERS>(); }

private:
  MessageAt message_at_;
  TileMessage message_;
  int count_ = 0;
};
