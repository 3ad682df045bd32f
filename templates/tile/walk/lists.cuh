//===- tile/walk/lists.cuh - What queries with lists of blocks see ----------------===//
//
// Kernels for lists have this file in the place of visible.cuh: a query sees the keys that the mask
// leaves of the blocks in its list (tile/walk/list_bits.cuh).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/hidden.cuh"
#include "tile/walk/list_bits.cuh"

static_assert(!PACKED && !WINDOW, "lists are of whole sequences, with a causal mask or none");

/// The list of a query, which all queries of its block share.
struct KeyList {
  const u32* words;

  __device__ __forceinline__ KeyList(const Sequence& at, int head, int query)
      : words(at.p.row_bits + at.batch * at.p.row_stride_b + head * at.p.row_stride_h +
              static_cast<s64>(query / SPARSE_Q) * row_words(at.p)) {}
  __device__ __forceinline__ KeyList(const QueryHead& at, int query)
      : KeyList(at, at.head, query) {}
  /// The first tile of SIZE keys from `from` on that it lists, or else `end`.
  template <int SIZE> __device__ __forceinline__ int first(int from, int end) const {
    static_assert(SPARSE_KV % SIZE == 0, "a tile lies in one block");
    return first_listed<SPARSE_KV / SIZE>([&](int i) { return __ldg(words + i * ROW_STEP); }, from,
                                          end);
  }
  template <int SIZE> __device__ __forceinline__ bool has(int tile) const {
    return bit<0>(tile / (SPARSE_KV / SIZE));
  }
  /// Whether some scores of a tile's block are hidden.
  template <int SIZE> __device__ __forceinline__ bool hides_part(int tile) const {
    return HIDES_ANYWHERE && bit<1>(tile / (SPARSE_KV / SIZE));
  }
  __device__ __forceinline__ bool is_invalid(const Params& p) const {
    return (__ldg(words + row_words(p) - ROW_STEP) & INVALID) != 0;
  }

private:
  template <int BEHIND> __device__ __forceinline__ bool bit(int block) const {
    return __ldg(words + block / WORD_BITS * ROW_STEP + BEHIND) >> block % WORD_BITS & 1;
  }
};

/// The lists of a block of keys, one of each query head that sees it.
struct QueryLists {
  const u32* words;
  int stride; ///< from a head's to the next one's

  __device__ __forceinline__ QueryLists(const KeyHead& at, int first_key)
      : stride(key_blocks(at.p) * column_words(at.p)) {
    words = at.p.column_bits + at.batch * static_cast<s64>(at.p.heads) * stride +
            first_key / SPARSE_KV * column_words(at.p);
  }
  /// The first tile of TOKENS_PER_TILE queries from `from` on, or else `end`.
  __device__ __forceinline__ int first(int head, int from, int end) const {
    return first_listed<TILES>([&](int i) { return word(head, i); }, from, end);
  }

private:
  static constexpr int TILES = SPARSE_Q / TOKENS_PER_TILE; ///< of a block
  __device__ __forceinline__ u32 word(int head, int i) const {
    return __ldg(words + (head * static_cast<s64>(stride) + i));
  }
};

constexpr bool HIDES_SCORES = HAS_MASK || HIDES_ANYWHERE;
/// Whether some key of a block is hidden from a query of a block: of those of these two, and of a
/// query head.
__device__ __forceinline__ bool hides_part(const Sequence& at, int head, int query, int key) {
  return HIDES_ANYWHERE && KeyList(at, head, query).hides_part<SPARSE_KV>(key / SPARSE_KV);
}
/// Whether any of these keys, of one block, is hidden from any of these queries, of a query head.
__device__ __forceinline__ bool any_hidden(const KeyHead& at, int head, Range queries, Range keys) {
  if constexpr (HIDES_ANYWHERE) {
    if (hides_part(at, head, queries.begin, keys.begin))
      return true;
  }
  return needs_mask(at, queries, keys);
}

__device__ __forceinline__ bool lists_nothing(const QueryHead& at, int query) {
  const KeyList list(at, query);
  const int end = keys_of(at, tokens_from(query, 1)).end;
  return list.first<SPARSE_KV>(0, ceil_div(end, SPARSE_KV)) * SPARSE_KV >= end &&
         !list.is_invalid(at.p);
}
/// Whether a query sees no key, whose P have this sum. Where any score may be hidden only the
/// sum tells.
__device__ __forceinline__ bool sees_nothing(const QueryHead& at, int query, float sum) {
  if constexpr (HIDES_ANYWHERE)
    return sum == 0;
  else
    return lists_nothing(at, query);
}
/// The same in the backward, where such queries have a ROW_SHIFT of infinity, which shift() reads.
template <typename Shift>
__device__ __forceinline__ bool saw_nothing(const QueryHead& at, int query, const Shift& shift) {
  if constexpr (HIDES_ANYWHERE)
    return shift() == INFINITY_F;
  else
    return lists_nothing(at, query);
}
__device__ __forceinline__ float known_sum(float sum, const QueryHead& at, int query) {
  return KeyList(at, query).is_invalid(at.p) ? __int_as_float(0x7fffffff) : sum;
}
