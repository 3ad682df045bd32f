//===- tile/sla/pooled_keys.cuh - Scores of the means of blocks of keys ---------===//
//
// An estimated alpha takes all keys of a block for their mean (SLA2's `alpha`, of sagebwd's own
// kind). The caller gives the means less their own mean, times the softmax's factor and LOG2_E, in
// 16 bits: scores are logarithms to base 2. The mean of means adds the same for all keys of a
// query, which comes from its FP32 values. A block's weight is its number of tokens, or none where
// the query's list has it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/estimated.cuh"
#include "ptx/math.cuh"
#include "tile/sla/channel_matrix.cuh"

constexpr int CHUNK = 32; ///< keys, or queries, whose scores a warp holds at a time
constexpr int CHUNKS = kPooledTile / CHUNK;

/// These are 16 rows of a warp and CHUNK columns, in the order of mma.sync's results.
using Scores = float[CHUNK / 8][4];

template <typename T>
__device__ __forceinline__ void multiply_as(float (&sums)[2][4], const u32 (&a)[4],
                                            const u32 (&b)[4]) {
  mma_16<T>(sums[0], a, b[0], b[1], sums[0]);
  mma_16<T>(sums[1], a, b[2], b[3], sums[1]);
}
/// Adds 16 rows' products with CHUNK rows of a tile, from `first` on, along channels [16 step,
/// ...).
__device__ __forceinline__ void add_scores(Scores& x, const u32 (&a)[4], const RowsOfB& columns,
                                           int first, int step) {
#pragma unroll
  for (int i = 0; i < CHUNK / 16; ++i) {
    u32 b[4];
    columns.load(b, first + 16 * i, step);
    mma_16<Element>(x[2 * i], a, b[0], b[1], x[2 * i]);
    mma_16<Element>(x[2 * i + 1], a, b[2], b[3], x[2 * i + 1]);
  }
}
/// Scores of 16 columns as operand A of the product along them.
template <typename T>
__device__ __forceinline__ void as_operand(u32 (&a)[4], const Scores& x, int columns16) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float(&of)[4] = x[2 * columns16 + w / 2];
    a[w] = pack<T>(of[2 * half_of_word(w)], of[2 * half_of_word(w) + 1]);
  }
}

/// The 16-bit means of a key head's blocks, and which of them a list leaves.
struct PooledKeys {
  int count;
  const Element* means;
  const s8* listed; ///< of head and sequence; a row of `count` for each list

  __device__ __forceinline__ PooledKeys(const Params& p, const QueryHead& at)
      : count(ceil_div(p.seq_kv, SPARSE_KV)),
        means(p.pooled_keys + at.flat_kv_head * count * HEAD_DIM),
        listed(p.block_mask + at.batch * p.row_stride_b + at.head * p.row_stride_h) {}
  __device__ __forceinline__ int tiles() const { return ceil_div(count, kPooledTile); }
  /// Starts copying a tile; rows without a block become zeros.
  __device__ __forceinline__ void load(u32 to, int tile) const {
    load_tile<kPooledTile, ROW_BYTES, THREADS>(
        to, means + static_cast<s64>(tile) * kPooledTile * HEAD_DIM, ROW_BYTES,
        count - tile * kPooledTile, HEAD_DIM);
  }
  /// Whether a block is listed, or not there.
  __device__ __forceinline__ bool is_out(int list, int key) const {
    return key >= count || listed[static_cast<s64>(list) * count + key] != 0;
  }
  /// The logarithm to base 2 of a block's weight.
  __device__ __forceinline__ float weight(const Params& p, int key, bool out) const {
    const float tokens = minimum(SPARSE_KV, p.seq_kv - key * SPARSE_KV);
    return out ? -INFINITY_F : log2_approx(tokens);
  }
};

/// Tiles of means in two stages, for a block that owns a list's queries. Weights lie beside them.
struct PooledTiles {
  PooledKeys keys;
  u32 stages, weights; ///< shared memory
  int list;

  __device__ __forceinline__ u32 stage(int tile) const {
    return stages + (tile & 1) * (kPooledTile * ROW_BYTES);
  }
  __device__ __forceinline__ u32 weights_of(int tile) const {
    return weights + (tile & 1) * (kPooledTile * 4);
  }
  __device__ __forceinline__ bool look(int tile) const {
    return threadIdx.x >= kPooledTile || keys.is_out(list, tile * kPooledTile + threadIdx.x);
  }
  __device__ __forceinline__ void note(const Params& p, int tile, bool out) const {
    if (threadIdx.x < kPooledTile)
      write_float(weights_of(tile) + threadIdx.x * 4,
                  keys.weight(p, tile * kPooledTile + threadIdx.x, out));
  }
  /// Calls `work` with each tile's place and its weights'. The caller has begun to copy the first,
  /// and noted its weights.
  template <typename Work>
  __device__ __forceinline__ void walk(const Params& p, Work&& work) const {
    const int tiles = keys.tiles();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      cp_async_wait<0>();
      __syncthreads(); // this tile is there, and nobody reads the one before it
      const bool more = tile + 1 < tiles;
      bool out = true;
      if (more) {
        keys.load(stage(tile + 1), tile + 1);
        cp_async_commit();
        out = look(tile + 1);
      }
      work(stage(tile), weights_of(tile));
      if (more)
        note(p, tile + 1, out);
    }
  }
};
