//===- tile/visible.cuh - Which keys a query sees, and walks over them ------===//
//
// All that a kernel knows of the mask. A window or a list of blocks would change what is here: a
// block of queries or keys meets the tokens of a Range, a loop over them is a Walk (backward_dkv
// steps over its range by itself: kernels/README.md), and only where needs_mask() are single scores
// asked for.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/place.cuh"

/// Tokens begin .. end - 1, or tiles.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range tokens_from(int first, int count) {
  return {first, first + count};
}

/// Which block of queries this thread block takes. Later queries see more keys: the longest first.
__device__ __forceinline__ int block_of_queries() {
  return CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}
/// The same read anew (ptx/special.cuh).
__device__ __forceinline__ int block_of_queries_anew() {
  const int block = read_block_x();
  return CAUSAL ? gridDim.x - 1 - block : block;
}

/// The keys that any of these queries sees.
__device__ __forceinline__ Range keys_of(const Sequence& at, Range queries) {
  return {0, CAUSAL ? maximum(0, minimum(at.seq_kv(), queries.end + at.causal_offset()))
                    : at.seq_kv()};
}
/// The keys that all of these queries see.
__device__ __forceinline__ Range keys_of_all(const Sequence& at, Range queries) {
  return {0, CAUSAL ? maximum(0, minimum(at.seq_kv(), queries.begin + 1 + at.causal_offset()))
                    : at.seq_kv()};
}
/// The queries that see any of these keys.
__device__ __forceinline__ Range queries_of(const Sequence& at, Range keys) {
  return {CAUSAL ? maximum(0, keys.begin - at.causal_offset()) : 0, at.seq_q()};
}
/// Whether any of these queries sees any of these keys.
__device__ __forceinline__ bool meet(const Sequence& at, Range queries, Range keys) {
  return !CAUSAL || keys.begin <= queries.end - 1 + at.causal_offset();
}

/// Whether any key of a tile is hidden from any query of it.
__device__ __forceinline__ bool needs_mask(const Sequence& at, Range queries, Range keys) {
  return (CAUSAL && keys.end - 1 > queries.begin + at.causal_offset()) || keys.end > at.seq_kv();
}
__device__ __forceinline__ bool hidden(const Sequence& at, int query, int key) {
  return key >= at.seq_kv() || (CAUSAL && key > query + at.causal_offset());
}
__device__ __forceinline__ bool sees_nothing(const Sequence& at, int query) {
  return CAUSAL && query + at.causal_offset() < 0;
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
/// `half` of n8 tile j. Where none is, nothing is asked.
struct NoneHidden {
  static constexpr bool ANY = false;
  __device__ __forceinline__ bool operator()(int, int, int) const { return false; }
};
class HiddenKeys {
public:
  static constexpr bool ANY = true;
  /// Rows g and g + 8 are queries `query` and query + 8. Keys before `begin`, 1 at most, are no
  /// query's.
  __device__ __forceinline__ HiddenKeys(const Sequence& at, int query, int first_key, int begin)
      : begin_(begin - first_key - lane_column()) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      end_[r] = keys_of(at, tokens_from(query + 8 * r, 1)).end - first_key - lane_column();
  }
  __device__ __forceinline__ bool operator()(int r, int j, int half) const {
    return 8 * j + half >= end_[r] || (8 * j + half < 1 && 8 * j + half < begin_);
  }

private:
  static __device__ __forceinline__ int lane_column() { return 2 * (lane_id() & 3); }
  int begin_, end_[2]; ///< visible columns, from this lane's first
};

/// A loop over the tiles of SIZE tokens that hold a range. `count` counts them, so that copies and
/// products agree on the stage.
template <int SIZE> struct Walk {
  int tile, end, count = 0;

  __device__ __forceinline__ explicit Walk(Range tokens)
      : tile(tokens.begin / SIZE), end(ceil_div(tokens.end, SIZE)) {}

  __device__ __forceinline__ bool more() const { return tile < end; }
  __device__ __forceinline__ int first() const { return tile * SIZE; }
  __device__ __forceinline__ int stage() const { return count % STAGES; }
  __device__ __forceinline__ Walk next() const {
    Walk walk = *this;
    ++walk.tile;
    ++walk.count;
    return walk;
  }
};
