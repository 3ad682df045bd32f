//===- tile/math/block_maxima.cuh - Under `block`, what a group of queries and keys shares ---===//
#pragma once

#include "tile/math/transposed_scores.cuh"
#include "tile/walk/tiles.cuh"

/// Largest P and dS of a group of queries and one of keys, which backward_dq has found, and the
/// scales of Q's and dO's transposed copies, one number for all channels. Under `row` there is
/// nothing of this: rows have their own maxima, and channels their own scales.
struct BlockMaxima {
  float p = 0, ds = 0;
  float scale_q = 1.0f, scale_dout = 1.0f;

  /// Reads those of a tile of queries and of a warp's keys from `warp_key` on.
  __device__ __forceinline__ BlockMaxima(const Params& p, const KeyHead& at, const QueryTile& tile,
                                         int warp_key) {
    if constexpr (BLOCK_SCALES) {
      const int first_query = tile.first_query();
      const s64 queries = tile.flat / (GROUP_Q / TILE_Q);
      const s64 pair = queries * at.key_groups<GROUP_KV>() + warp_key / GROUP_KV;
      // A block in which no query sees a key was not visited.
      if (meet(at, tokens_from(first_query / GROUP_Q * GROUP_Q, GROUP_Q),
               tokens_from(warp_key / GROUP_KV * GROUP_KV, GROUP_KV))) {
        this->p = DV16 ? 0.0f : p.tile_p_max[pair];
        ds = DK16 ? 0.0f : p.tile_ds_max[pair];
      }
      if constexpr (!DK16)
        scale_q = p.qt8_scale[queries * (CHANNEL_VECTORS * HEAD_DIM)];
      if constexpr (!DV16)
        scale_dout = p.dot8_scale[queries * (CHANNEL_VECTORS * HEAD_DIM)];
    }
  }
};
