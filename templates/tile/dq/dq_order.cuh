//===- tile/dq/dq_order.cuh - In which order blocks add to dQ -------------------===//
//
// The blocks of one head add to the sums of a query in the order of their keys, so that
// the sums have the same bits in every run. A counter for each pair of tiles of queries says how
// many blocks have added to it; a block waits until as many have as there are before it.
//
// A block may wait only for blocks that run or have ended. So blocks do not take keys by their
// number, which says nothing of when they start, but by a ticket: the first block that starts takes
// the first ticket, and waits for nobody. HEADS_AT_ONCE tickets in a row are of as many heads and
// the same keys. A block then follows the one before it, of the same head, at a distance of about
// a pair of tiles, and few wait when they begin.
//
// The counters lie behind the ticket in dq_turns, [head][pair of tiles].
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/order.cuh"
#include "tile/dq/dq_sums8.cuh"
#include "tile/walk/tiles.cuh"

/// A block that owns keys works on these: its number among all blocks of keys, or its place among
/// those of packed sequences; a key/value head; and a batch.
struct KeyPlace {
  int x, kv_head, batch;
};

/// Tiles of queries that have one counter.
constexpr int TILES_A_TURN = 2;
constexpr int HEADS_AT_ONCE = 32;

/// All threads call this. It has a barrier.
__device__ __forceinline__ KeyPlace take_place(const Params& p, u32 shared) {
  if (threadIdx.x == 0)
    write_word(shared + LAYOUT.order, take_ticket(p.dq_turns));
  __syncthreads();
  const u32 ticket = read_word(shared + LAYOUT.order);
  const u32 blocks = gridDim.x, first_head = ticket / (HEADS_AT_ONCE * blocks) * HEADS_AT_ONCE;
  const u32 heads = minimum(HEADS_AT_ONCE, gridDim.y * gridDim.z - first_head);
  const u32 behind = ticket - first_head * blocks, head = first_head + behind % heads;
  return {static_cast<int>(behind / heads), static_cast<int>(head % gridDim.y),
          static_cast<int>(head / gridDim.y)};
}

/// The block's turns. One thread of the block calls all of these.
class DqOrder {
  static constexpr u32 NONE = ~0u;

public:
  __device__ __forceinline__ DqOrder(const Params& p, const KeyHead& at, u32 shared, int block)
      : p_(p), at_(at), last_(shared + LAYOUT.order + 4), block_(block) {}

  __device__ __forceinline__ void begin() const { write_word(last_, NONE); }
  /// How many blocks have added to the pair that a tile is of.
  __device__ __forceinline__ u32 read(const QueryTile& tile) const {
    return read_counter(counter(tile.flat / TILES_A_TURN));
  }
  /// Waits until it is the block's turn at the tile's pair, of which read() has said `seen`.
  __device__ __forceinline__ void wait(const QueryTile& tile, u32 seen) const {
    const u32 pair = tile.flat / TILES_A_TURN;
    wait_for_count(counter(pair), seen, blocks_before(tile.in_head / TILES_A_TURN),
                   "blocks that add to dQ before this one");
    write_word(last_, pair);
  }
  /// The last pair's turn is the next block's. A barrier has come since all threads added to it.
  __device__ __forceinline__ void pass() const {
    if (const u32 pair = read_word(last_); pair != NONE)
      count_behind(counter(pair));
  }

private:
  __device__ __forceinline__ u32* counter(u32 pair) const { return p_.dq_turns + 1 + pair; }
  /// How many blocks of keys before this one visit a pair of tiles. All that do are neighbours. If
  /// no window hides keys before a query, the first of them is the first of all. Else it is the one
  /// whose last key is not before the window of the pair's first query.
  __device__ __forceinline__ u32 blocks_before(int pair) const {
    if constexpr (!WINDOW)
      return block_;
    static_assert(TILES_A_TURN * TOKENS_PER_TILE == BLOCK_KV);
    const int offset = at_.window_offset();
    const int blocks = offset >= 0 ? offset / BLOCK_KV : -ceil_div(-offset, BLOCK_KV);
    return block_ - maximum(0, pair + blocks);
  }

  const Params& p_;
  const KeyHead& at_;
  u32 last_; ///< in shared memory: the pair whose turn the block has, or had last
  int block_;
};
