//===- tile/walk/mask.cuh - Which keys the mask leaves a query -------------------===//
//
// This file alone knows the mask. It gives the range of tokens that a block of queries or keys
// meets; tile/walk/tiles.cuh walks over it. Only where needs_mask() is true do kernels ask about
// single scores.
//
// CAUSAL: a query does not see the keys behind its own. WINDOW: it does not see all keys before it
// either.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/place.cuh"

/// Whether a query may not see some key of its sequence.
constexpr bool HAS_MASK = CAUSAL;
static_assert(!WINDOW || (CAUSAL && SINK_KEYS == 0), "a window has two edges, and no key apart");

/// Tokens begin .. end - 1, or tiles.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range tokens_from(int first, int count) {
  return {first, first + count};
}

/// Which block of queries this thread block takes. LATER_FIRST: later queries see more keys, as in
/// most masks, and what takes longest is begun first.
__device__ __forceinline__ int block_of_queries() {
  return PACKED ? packed_place().block : LATER_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}
/// Whether the block has queries to work on: it finds its sequence. A block that has none ends, and
/// so does one without keys, of which there are no copies, scales or mean, when it has stored
/// zeros.
template <int SIZE, typename Store>
__device__ __forceinline__ bool enter_queries(const Params& p, const Store& store_empty) {
  if constexpr (PACKED) {
    if (!enter_sequence<SIZE, true, CAUSAL>(p, blockIdx.x))
      return false;
    if (packed_place().keys == 0) {
      store_empty(p);
      return false;
    }
  }
  return true;
}
/// Reads it again (ptx/special.cuh).
__device__ __forceinline__ int reread_block_of_queries() {
  if constexpr (PACKED)
    return packed_place().block;
  const int block = read_block_x();
  return LATER_FIRST ? gridDim.x - 1 - block : block;
}

/// From the first key that any of these queries sees to the last one. If a window lies behind the
/// last key, the range is that one key, hidden: a walk never starts at a tile that does not exist.
__device__ __forceinline__ Range keys_of(const Sequence& at, Range queries) {
  const int end =
      CAUSAL ? maximum(0, minimum(at.seq_kv(), queries.end + at.causal_offset())) : at.seq_kv();
  return {WINDOW ? maximum(0, minimum(end - 1, queries.begin + at.window_offset())) : 0, end};
}
/// The keys that all of these queries see; none may be left.
__device__ __forceinline__ Range keys_of_all(const Sequence& at, Range queries) {
  return {WINDOW ? maximum(0, queries.end - 1 + at.window_offset()) : 0,
          CAUSAL ? maximum(0, minimum(at.seq_kv(), queries.begin + 1 + at.causal_offset()))
                 : at.seq_kv()};
}
/// The tiles of SIZE tokens that hold a range.
template <int SIZE> __device__ __forceinline__ Range tiles_of(Range tokens) {
  return {tokens.begin / SIZE, ceil_div(tokens.end, SIZE)};
}
/// The tiles of SIZE keys that need no mask for these queries. Key 0 is hidden where it is
/// separate.
template <int SIZE>
__device__ __forceinline__ Range unmasked_tiles_of(const Sequence& at, Range queries) {
  const Range keys = keys_of_all(at, queries);
  return {WINDOW ? ceil_div(keys.begin, SIZE) : SINK_KEYS, keys.end / SIZE};
}
/// The queries that see any of these keys.
__device__ __forceinline__ Range queries_of(const Sequence& at, Range keys) {
  return {CAUSAL ? maximum(0, keys.begin - at.causal_offset()) : 0,
          WINDOW ? maximum(0, minimum(at.seq_q(), keys.end - at.window_offset())) : at.seq_q()};
}
/// Whether a query lies outside of queries_of() some keys. Queries behind the last one count as
/// inside: their P is 0 in any case.
__device__ __forceinline__ bool is_outside(int query, Range queries) {
  return query < queries.begin || (WINDOW && query >= queries.end);
}
/// Whether any of these queries sees any of these keys.
__device__ __forceinline__ bool meet(const Sequence& at, Range queries, Range keys) {
  return (!CAUSAL || keys.begin <= queries.end - 1 + at.causal_offset()) &&
         (!WINDOW || keys.end - 1 >= queries.begin + at.window_offset());
}

/// Whether any key of a tile is hidden from any query of it.
__device__ __forceinline__ bool needs_mask(const Sequence& at, Range queries, Range keys) {
  return (CAUSAL && keys.end - 1 > queries.begin + at.causal_offset()) ||
         (WINDOW && keys.begin < queries.end - 1 + at.window_offset()) || keys.end > at.seq_kv();
}
__device__ __forceinline__ bool hidden(const Sequence& at, int query, int key) {
  return key >= at.seq_kv() || (CAUSAL && key > query + at.causal_offset()) ||
         (WINDOW && key < query + at.window_offset());
}
__device__ __forceinline__ bool sees_nothing(const Sequence& at, int query) {
  return (CAUSAL && query + at.causal_offset() < 0) ||
         (WINDOW && query + at.window_offset() >= at.seq_kv());
}

/// Takes hidden scores out: is_hidden(r, column) of row g + 8r of a warp's accumulators. `nothing`
/// is 0 for what are probabilities already.
template <int COLUMNS8, typename Hidden>
__device__ __forceinline__ void mask(float (&x)[COLUMNS8][4], const Hidden& is_hidden,
                                     float nothing = -INFINITY_F) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (is_hidden(i >> 1, 8 * j + 2 * (lane_id() & 3) + (i & 1)))
        x[j][i] = nothing;
    }
  }
}

/// Which scores of a warp's 16 rows and a tile of keys are hidden: of row g + 8r, the accumulator
/// `half` of n8 tile j. If none is, nothing is asked.
struct NoneHidden {
  static constexpr bool ANY = false;
  __device__ __forceinline__ bool operator()(int, int, int) const { return false; }
};
class HiddenKeys {
public:
  static constexpr bool ANY = true;
  HiddenKeys() = default;
  /// Rows g and g + 8 are queries `query` and query + 8. Keys before `begin`, 1 at most, are no
  /// query's.
  __device__ __forceinline__ HiddenKeys(const Sequence& at, int query, int first_key, int begin) {
    const int first_column = first_key + lane_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      end_[r] = keys_of(at, tokens_from(query + 8 * r, 1)).end - first_column;
      begin_[r] = (WINDOW ? query + 8 * r + at.window_offset() : begin) - first_column;
    }
  }
  __device__ __forceinline__ bool operator()(int r, int j, int half) const {
    const int column = 8 * j + half;
    return column >= end_[r] || ((WINDOW || column < 1) && column < begin_[r]);
  }

private:
  static __device__ __forceinline__ int lane_column() { return 2 * (lane_id() & 3); }
  int begin_[2], end_[2]; ///< visible columns, from this lane's first
};
