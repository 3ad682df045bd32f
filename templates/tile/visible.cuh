//===- tile/visible.cuh - Which keys a query sees, and walks over them ------===//
//
// All that a kernel knows of the mask. A window, a list of blocks or packed sequences would change
// what is here: a block of queries or keys meets the tokens of a Range, a loop over them is a Walk
// (why backward_dkv steps over its range by itself is told in kernels/README.md), and only where
// needs_mask() are single scores asked for.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"

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

/// The keys that any of these queries sees.
__device__ __forceinline__ Range keys_of(const Params& p, Range queries) {
  return {0, CAUSAL ? maximum(0, minimum(p.seq_kv, queries.end + p.causal_offset)) : p.seq_kv};
}
/// The queries that see any of these keys.
__device__ __forceinline__ Range queries_of(const Params& p, Range keys) {
  return {CAUSAL ? maximum(0, keys.begin - p.causal_offset) : 0, p.seq_q};
}
/// Whether any of these queries sees any of these keys.
__device__ __forceinline__ bool meet(const Params& p, Range queries, Range keys) {
  return !CAUSAL || keys.begin <= queries.end - 1 + p.causal_offset;
}

/// Whether any key of a tile is hidden from any query of it.
__device__ __forceinline__ bool needs_mask(const Params& p, Range queries, Range keys) {
  return (CAUSAL && keys.end - 1 > queries.begin + p.causal_offset) || keys.end > p.seq_kv;
}
__device__ __forceinline__ bool hidden(const Params& p, int query, int key) {
  return key >= p.seq_kv || (CAUSAL && key > query + p.causal_offset);
}
__device__ __forceinline__ bool sees_nothing(const Params& p, int query) {
  return CAUSAL && query + p.causal_offset < 0;
}

/// Takes hidden scores out: is_hidden(r, column) of row g + 8r of a warp's accumulators.
template <int COLUMNS8, typename Hidden>
__device__ __forceinline__ void mask(float (&x)[COLUMNS8][4], const Hidden& is_hidden) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (is_hidden(i >> 1, 8 * j + 2 * (lane_id() & 3) + (i & 1)))
        x[j][i] = -INFINITY_F;
    }
  }
}

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
