//===- tile/memory/dkv_loads.cuh - What kernels that own keys have in shared memory ---===//
//
// Keys and values of the block, stages of tiles of queries, and the scales of three runs; and the
// copies that bring them there. Offsets of a stage in LAYOUT count from `stage`.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/key_gradients.cuh"
#include "tile/math/products.cuh"
#include "tile/math/transposed_scores.cuh"
#include "tile/memory/key_layout.cuh"

/// DP16: in a stage the factors of dP's sums lie where key 0's dS would.
constexpr int ROW_FACTOR = ROW_SINK;
/// A query's last vector comes only where scores need back what it has.
constexpr int ROWS_FLOATS = BENDS_SCORES ? ROW_VECTORS * TILE_Q : LAYOUT.rows_bytes / 4;

constexpr int SCALE_BUFFERS = LAYOUT.scale_buffers;
/// dO of a tile comes in so many parts of its channels, one after the other.
constexpr int DOUT_PARTS = LAYOUT.dout_parts;

__device__ __forceinline__ u32 scale_buffer(u32 shared, int buffer) {
  return shared + LAYOUT.channel_scales + buffer * CHANNEL_SCALES_BYTES;
}
__device__ __forceinline__ int buffer_behind(int buffer) {
  return buffer + 1 < SCALE_BUFFERS ? buffer + 1 : 0;
}

/// Starts copies to shared memory. Each of rows() and for_gradients() ends a group of them.
struct Loads {
  const Params& p;
  const KeyHead& at;
  const QueryTiles& walk;
  u32 shared;

  /// K and V, which stay for the whole walk.
  __device__ __forceinline__ void kept(int first_key) const {
    load_score_rows<BLOCK_KV>(shared + LAYOUT.keys, p.k8 + (at.padded_key() + first_key) * HEAD_DIM,
                              p.k + at.first_key(p.k_stride_b, p.k_stride_s) +
                                  at.kv_head * p.k_stride_h + first_key * p.k_stride_s,
                              p.k_stride_s, at.seq_kv() - first_key, p.channels);
    if constexpr (DP16)
      load_swizzled<BLOCK_KV * VALUE_ROW_BYTES>(
          shared + LAYOUT.values, half_v(p) + (at.padded_key() + first_key) * HEAD_DIM);
    else
      load_tile<BLOCK_KV, VALUE_ROW_BYTES, THREADS>(
          shared + LAYOUT.values,
          p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h +
              first_key * p.v_stride_s,
          p.v_stride_s * 2, at.seq_kv() - first_key, p.value_channels);
  }
  /// Brings what S and dP take of a tile of queries.
  __device__ __forceinline__ void rows(const QueryTile& tile, u32 stage) const {
    if (walk.has(tile)) {
      const int valid = at.seq_q() - tile.first_query();
      load_score_rows<TILE_Q>(stage + LAYOUT.queries, p.q8 + tile.elements(), query_rows(tile),
                              p.q_stride_s, valid, p.channels);
      load_floats<ROWS_FLOATS, THREADS>(stage + LAYOUT.rows, p.q_rows + tile.rows());
      if constexpr (DOUT_PARTS == 1)
        load_dout_rows<TILE_Q>(stage + LAYOUT.dout, dout_copy(p) + tile.elements(),
                               rows_of_dout(tile), p.dout_stride_s, valid, p.value_channels);
      else
        part_of_dout(tile, stage, 0);
      if constexpr (DP16)
        load_floats<TILE_Q, THREADS>(stage + LAYOUT.rows + ROW_FACTOR * TILE_Q * 4,
                                     dp_factors(p) + tile.rows() / ROW_VECTORS);
      if constexpr (DP16 && DV16 && !LAYOUT.dv_dout_is_late)
        dout_of_tensor(tile, stage, valid);
    }
    cp_async_commit();
  }
  /// A part of the channels of a tile's dO.
  __device__ __forceinline__ void part_of_dout(const QueryTile& tile, u32 stage, int part) const {
    static_assert(DOUT_PARTS == 1 || SCALED_DOUT || DP16, "a copy of dO is split, not the tensor");
    constexpr int BYTES = TILE_Q * VALUE_ROW_BYTES / DOUT_PARTS;
    load_swizzled<BYTES>(stage + LAYOUT.dout, dout_copy(p) + tile.elements(), part * BYTES);
  }
  /// Brings what dK and dV take beside it.
  __device__ __forceinline__ void for_gradients(const QueryTile& tile, u32 stage) const {
    if (walk.has(tile)) {
      const u32 of_dk = stage + LAYOUT.dk_queries;
      const u64 transposed = tile.elements() + first_channel() * TILE_Q;
      if constexpr (DK16)
        load_tile<TILE_Q, SUM_ROW_BYTES, THREADS>(of_dk, query_rows(tile) + first_channel(),
                                                  p.q_stride_s * 2, at.seq_q() - tile.first_query(),
                                                  p.channels);
      else
        load_swizzled<TILE_Q * SUM_CHANNELS>(of_dk, p.qt8 + transposed);
      if constexpr (!DV16 && !LAYOUT.dv_dout_is_late)
        load_swizzled<TILE_Q * SUM_CHANNELS>(stage + LAYOUT.dv_dout, p.dot8 + transposed);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void late_dv_dout(const QueryTile& tile, u32 stage) const {
    if constexpr (DV16)
      dout_of_tensor(tile, stage, at.seq_q() - tile.first_query());
    else
      load_swizzled<TILE_Q * SUM_CHANNELS>(stage + LAYOUT.dv_dout,
                                           p.dot8 + tile.elements() + first_channel() * TILE_Q);
    cp_async_commit();
  }
  /// The scales of the run that `tile` is in.
  __device__ __forceinline__ void channel_scales(const QueryTile& tile, int buffer) const {
    if constexpr (DKV_HAS_CHANNEL_SCALES) {
      constexpr int VECTORS = CHANNEL_PARTS == 1 ? CHANNEL_VECTORS : 1; // that lie together
      constexpr int FLOATS = VECTORS * SUM_CHANNELS;
      const u32 channel_scales = scale_buffer(shared, buffer);
      const KeyHead own =
          HAS_LISTS && BLOCKS_PER_SM > 2 ? reread_key_head(p) : at; // registers are short
      const s64 scale_block = (own.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.run()) *
                                  (CHANNEL_VECTORS * HEAD_DIM) +
                              first_channel();
#pragma unroll
      for (int vector = 0; vector < CHANNEL_VECTORS; vector += VECTORS) {
        const u32 to = channel_scales + vector * VECTOR_BYTES;
        const s64 from = scale_block + vector * HEAD_DIM;
        if constexpr (!DK16)
          load_floats_if<FLOATS, THREADS>(to + SCALES_OF_Q, p.qt8_scale + from, walk.has(tile));
        if constexpr (!DV16)
          load_floats_if<FLOATS, THREADS>(to + SCALES_OF_DOUT, p.dot8_scale + from, walk.has(tile));
      }
    }
  }

private:
  /// The caller's dO for dV, where dP takes a copy.
  __device__ __forceinline__ void dout_of_tensor(const QueryTile& tile, u32 stage,
                                                 int valid) const {
    load_tile<TILE_Q, SUM_ROW_BYTES, THREADS>(stage + LAYOUT.dv_dout,
                                              rows_of_dout(tile) + first_channel(),
                                              p.dout_stride_s * 2, valid, p.value_channels);
  }
  __device__ __forceinline__ const Element* rows_of_dout(const QueryTile& tile) const {
    return p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) + tile.head * p.dout_stride_h +
           tile.first_query() * p.dout_stride_s;
  }
  __device__ __forceinline__ const Element* query_rows(const QueryTile& tile) const {
    return p.q + at.first_query(p.q_stride_b, p.q_stride_s) + tile.head * p.q_stride_h +
           tile.first_query() * p.q_stride_s;
  }
};

/// The walk stands at this tile, with its stage and the next one's, and the buffer of its run's
/// scales.
struct Position {
  QueryTile tile;
  u32 stage, next_stage;
  int buffer;
  QueryTile next; ///< of lists, where it takes long to find
};

/// Behind a run this rescales the sums to the scales of the next one, that of the tile at which the
/// walk stands, or subtracts their bias.
__device__ __forceinline__ void rescale_to_run(Sums& dk, Sums& dv, const Loads& load,
                                               Position& now) {
  if constexpr (DKV_HAS_CHANNEL_SCALES) {
    // The scales came during the run that ends; nobody reads the buffer of the run before it any
    // more.
    const u32 last = scale_buffer(load.shared, now.buffer);
    now.buffer = buffer_behind(now.buffer);
    rescale_columns(dk, dv, last, scale_buffer(load.shared, now.buffer));
    load.channel_scales(load.walk.next_run(now.tile), buffer_behind(now.buffer));
    if constexpr (STAGES == 2)
      cp_async_commit(); // else they came behind a run of one tile
  } else {
    dk.subtract_bias();
    dv.subtract_bias();
  }
}
