//===- tile/sla/best_blocks.cuh - A list of the blocks with the best scores ------===//
//
// A row of scores has one for each block of keys. Listed are those that `always` names, which count
// among the `kept`, and the best of the others until there are so many. NaN counts as the highest,
// -0 equals 0, of equal scores the earlier block is taken, and a score of -inf is never.
// listed_mask gets a byte for each block, packed_bits the words of tile/walk/list_bits.cuh; one of
// the two may be null, as `always` may.
//
// A warp makes a list. A score's rank is an integer in the scores' order. The warp finds the rank
// of the last block that is listed bit by bit, from the highest: a bit is set if as many ranks as
// are wanted lie at or above it. Registers hold the ranks of a row's first words of 32 blocks; what
// is behind them is read, and stays near, for each bit.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/list_bits.cuh"

constexpr u32 NEVER = 0;        ///< the rank of a block that is not to be chosen
constexpr u32 NAN_RANK = ~0u;   ///< the highest
constexpr int ALL = 0x7fffffff; ///< more blocks than there are

/// An integer in the order of scores.
__device__ __forceinline__ u32 rank_of(float score) {
  constexpr u32 SIGN = 1u << 31, INFINITE = 0x7f800000u;
  const u32 bits = __float_as_uint(score), magnitude = bits & ~SIGN;
  if (magnitude > INFINITE)
    return NAN_RANK;
  if (bits == (SIGN | INFINITE))
    return NEVER;
  return bits > SIGN ? ~bits : magnitude | SIGN; // -0 as 0
}

/// A row, of which each lane has one block of each word.
template <int HELD> struct Row {
  const float* scores;
  const s8* always;
  int blocks;
  u32 ranks[HELD];

  __device__ __forceinline__ static int block_of(int word) { return word * WORD_BITS + lane_id(); }
  __device__ __forceinline__ bool is_always(int word) const {
    return always && block_of(word) < blocks && always[block_of(word)] != 0;
  }
  __device__ __forceinline__ u32 read_rank(int word) const {
    const int block = block_of(word);
    return block < blocks && !is_always(word) ? rank_of(scores[block]) : NEVER;
  }
  __device__ __forceinline__ void read() {
#pragma unroll
    for (int word = 0; word < HELD; ++word)
      ranks[word] = read_rank(word);
  }
  __device__ __forceinline__ int count_always() const {
    int count = 0;
    if (always)
      for (int word = 0; word * WORD_BITS < blocks; ++word)
        count += is_always(word);
    return __reduce_add_sync(~0u, count);
  }
  /// How many ranks are `least` or higher.
  __device__ __forceinline__ int count_from(u32 least) const {
    int count = 0;
#pragma unroll
    for (int word = 0; word < HELD; ++word)
      count += ranks[word] >= least;
#pragma unroll 4
    for (int word = HELD; word * WORD_BITS < blocks; ++word)
      count += read_rank(word) >= least;
    return __reduce_add_sync(~0u, count);
  }
};

/// Which ranks are chosen: those above `last`, and so many of `last` itself, the first ones.
struct Choice {
  u32 last;
  int of_last;
};

template <int HELD> __device__ __forceinline__ Choice choose(const Row<HELD>& row, int wanted) {
  if (wanted <= 0)
    return {NAN_RANK, 0};
  u32 last = NEVER;
#pragma unroll 1
  for (u32 bit = 1u << 31; bit != 0; bit /= 2) {
    const int count = row.count_from(last | bit);
    last |= count >= wanted ? bit : 0;
    if (count == wanted) // lower bits part no two of them
      return {last, ALL};
  }
  if (last == NEVER) // fewer than wanted have a score
    return {NEVER, 0};
  return {last, wanted - (last == NAN_RANK ? 0 : row.count_from(last + 1))};
}

/// `list` is the list's number among all.
template <int HELD>
__device__ __forceinline__ void make_list(const Params& p, const float* scores, s64 list) {
  Row<HELD> row{scores, p.always, key_blocks(p)};
  row.read();
  const Choice choice = choose(row, p.kept - row.count_always());
  const int words = row_words(p);
  int found = 0; // of the last rank, in the words before
  const auto write = [&](int word, u32 rank) {
    const u32 of_last = __ballot_sync(~0u, rank == choice.last);
    const int before = found + __popc(of_last & ((1u << lane_id()) - 1));
    found += __popc(of_last);
    const bool chosen = rank > choice.last || (rank == choice.last && before < choice.of_last);
    const bool listed = chosen || row.is_always(word);
    const u32 bits = __ballot_sync(~0u, listed);
    const int block = row.block_of(word);
    if (p.listed_mask && block < row.blocks)
      p.listed_mask[list * row.blocks + block] = listed;
    if (p.packed_bits && lane_id() == 0)
      p.packed_bits[list * words + word] = bits;
  };
#pragma unroll
  for (int word = 0; word < HELD; ++word)
    if (word < words)
      write(word, row.ranks[word]);
  for (int word = HELD; word < words; ++word)
    write(word, row.read_rank(word));
}

/// With as many registers as a row needs.
__device__ __forceinline__ void list_best(const Params& p, const float* scores, s64 list) {
  if (key_blocks(p) <= 8 * WORD_BITS)
    make_list<8>(p, scores, list);
  else if (key_blocks(p) <= 16 * WORD_BITS)
    make_list<16>(p, scores, list);
  else
    make_list<32>(p, scores, list);
}
