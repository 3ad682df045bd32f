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

// Each class asks once about all scores of a lane and keeps a bit of each: registers are short, and
// unrolled code would ask about all scores at a time.

/// Which keys are hidden from queries g and g + 8: of row g + 8r, the accumulator `half` of n8 tile
/// j of COLUMNS8.
template <int COLUMNS8> class KeysHiddenFrom {
  static constexpr int COLUMNS = 2 * COLUMNS8; ///< of a lane
  static_assert(COLUMNS <= 32, "a bit for each");
  static constexpr int WORDS = COLUMNS <= 16 ? 1 : 2; ///< rows share one

public:
  static constexpr bool ANY = true;
  KeysHiddenFrom() = default;
  __device__ __forceinline__ KeysHiddenFrom(const QueryHead& at, int query, int first_key, int) {
    const MaskOfHead of_head(at.p, at.batch, at.head, at.kv_head);
#pragma unroll 1
    for (int i = 0; i < COLUMNS; ++i) {
      const int key = first_key + 2 * (lane_id() & 3) + 8 * (i / 2) + i % 2;
      const MaskOfKey of_key = of_head.of(minimum(key, at.seq_kv() - 1));
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (hidden(at, query + 8 * r, key) || of_key.hides_from(query + 8 * r))
          bits_[word_of(r)] |= 1u << (first_of(r) + i);
    }
  }
  __device__ __forceinline__ bool operator()(int r, int j, int half) const {
    return bits_[word_of(r)] >> (first_of(r) + 2 * j + half) & 1;
  }

private:
  static __device__ __forceinline__ int word_of(int r) { return WORDS == 2 ? r : 0; }
  static __device__ __forceinline__ int first_of(int r) { return WORDS == 2 ? 0 : r * COLUMNS; }
  u32 bits_[WORDS] = {};
};

/// From which queries of a tile, of a query head, two keys are hidden: of row g + 8r, key_of(r), by
/// the column.
class QueriesHiddenFrom {
  static constexpr int COLUMNS = TOKENS_PER_TILE / 4; ///< of a lane
  static_assert(2 * COLUMNS <= 32, "a bit for each");

public:
  template <typename KeyOf>
  __device__ __forceinline__ QueriesHiddenFrom(const KeyHead& at, int head, const KeyOf& key_of,
                                               int first_query) {
    const MaskOfHead of_head(at.p, at.batch, head, at.kv_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = key_of(r);
      const MaskOfKey of_key = of_head.of(minimum(key, at.seq_kv() - 1));
#pragma unroll 2
      for (int i = 0; i < COLUMNS; ++i) {
        const int query = first_query + 8 * (i / 2) + 2 * (lane_id() & 3) + i % 2;
        if (hidden(at, query, key) || of_key.hides_from(query))
          bits_ |= 1u << (r * COLUMNS + i);
      }
    }
  }
  __device__ __forceinline__ bool operator()(int r, int column) const {
    return bits_ >> (r * COLUMNS + column / 8 * 2 + column % 2) & 1;
  }

private:
  u32 bits_ = 0;
};
