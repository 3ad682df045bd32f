//===- tile/walk/hidden_anywhere.cuh - Which scores of a tile are hidden ----------===//
//
// Kernels that hide any score, beside those that mask.cuh hides, have this file in the place of
// hidden.cuh. Blocks of keys that are hidden from all queries of a block are in no list. A word
// behind each of a list says in which blocks some scores are hidden (kernels/interval_bits.cuh,
// kernels/mask_bits.cuh).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/hidden_by_intervals.cuh"
#include "tile/walk/mask.cuh"

constexpr bool HIDES_ANYWHERE = true;

// Each class asks once, and keeps a bit of each score of a lane. A lane asks about QUERIES_ASKED
// queries of a key at a time, each lane about others, and the warp hands around what it found.

/// Which keys are hidden from queries g and g + 8: of row g + 8r, the accumulator `half` of n8 tile
/// j of COLUMNS8.
template <int COLUMNS8> class KeysHiddenFrom {
  static constexpr int WORDS = COLUMNS8 / 8; ///< each for 64 keys. A lane asks about two
  static_assert(WORDS * 8 == COLUMNS8 && QUERIES_ASKED == 16, "a warp has 16 rows");

public:
  static constexpr bool ANY = true;
  KeysHiddenFrom() = default;
  __device__ __forceinline__ KeysHiddenFrom(const QueryHead& at, int query, int first_key, int) {
    const MaskOfHead of_head(at.p, at.batch, at.head, at.kv_head);
    const int row = lane_id() / 4;
    const auto queries = of_head.queries_from<QUERIES_ASKED>(query - row);
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const int key = first_key + 64 * word + lane_id();
      const u32 found = of_head.hidden_from(at, key, queries, 0) |
                        of_head.hidden_from(at, key + 32, queries, 0) << QUERIES_ASKED;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = 8 * (i / 2) + 2 * (lane_id() & 3) + i % 2;
        bits_[word] |= (__shfl_sync(~0u, found, column) >> row & 0x01010101u) << i;
      }
    }
  }
  __device__ __forceinline__ bool operator()(int r, int j, int half) const {
    return bits_[j / 8] >> (j % 8 / 4 * 16 + r * 8 + j % 4 * 2 + half) & 1;
  }

private:
  u32 bits_[WORDS] = {};
};

/// From which queries of a tile, of a query head, two keys are hidden: of row g + 8r, key_of(r), by
/// the column.
class QueriesHiddenFrom {
  static_assert(TOKENS_PER_TILE == 4 * QUERIES_ASKED, "four lanes have the same keys");

public:
  template <typename KeyOf>
  __device__ __forceinline__ QueriesHiddenFrom(const KeyHead& at, int head, const KeyOf& key_of,
                                               int first_query) {
    const MaskOfHead of_head(at.p, at.batch, head, at.kv_head);
    const auto queries = of_head.queries_from<TOKENS_PER_TILE>(first_query);
    const int own = lane_id() & 3, asked = QUERIES_ASKED * own;
    const u32 found = of_head.hidden_from(at, key_of(0), queries, asked) |
                      of_head.hidden_from(at, key_of(1), queries, asked) << QUERIES_ASKED;
#pragma unroll
    for (int lane = 0; lane < 4; ++lane)
      bits_ |= (__shfl_sync(~0u, found, lane_id() - own + lane) >> 2 * own & 0x03030303u)
               << 2 * lane;
  }
  __device__ __forceinline__ bool operator()(int r, int column) const {
    return bits_ >> (r * 16 + column % 16 / 8 * 8 + column / 16 * 2 + column % 2) & 1;
  }

private:
  u32 bits_ = 0;
};
