//===- tile/math/mean_scores.cuh - Where scores of smoothed queries are made whole ---===//
//
// Under SMOOTH_Q the copy of Q lacks the mean of its scale block's queries. So each score lacks one
// number, which is the same for all queries of a scale block and depends on the key.
// kernels/mean_scores.cuh has computed these numbers, in log2 units; this file says where they lie
// (tile/math/mean_columns.cuh adds them).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/tiles.cuh"

/// Gives those of the scale block of a query of the head, from that key on.
__device__ __forceinline__ const float* mean_scores_of(const QueryHead& at, int query, int key) {
  if constexpr (!SMOOTH_Q)
    return nullptr;
  const s64 scale_block = at.first_query_scale_block<CHANNEL_TOKENS_Q>() + query / CHANNEL_TOKENS_Q;
  return at.p.mean_scores + scale_block * at.padded_kv() + key;
}
/// For a tile of queries, of two keys.
__device__ __forceinline__ float2 mean_scores_of(const KeyHead& at, const QueryTile& tile,
                                                 const int (&key)[2]) {
  if constexpr (!SMOOTH_Q)
    return {0, 0};
  const s64 scale_block =
      at.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.first_query() / CHANNEL_TOKENS_Q;
  const float* of_block = at.p.mean_scores + scale_block * at.padded_kv();
  return {__ldg(of_block + key[0]), __ldg(of_block + key[1])};
}
