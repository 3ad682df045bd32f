//===- tile/math/fused_gradients.cuh - P and dS of a warp-specialised backward ---===//
//
// This file has what becomes of a warp's 16 keys by 64 queries between its products, and keeps P
// while it waits for dP.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/transposed_scores.cuh"
#include "tile/walk/visible.cuh"

/// The next tile's S is formed beside this one's dS. Otherwise it is formed after it, and P waits
/// for dP in the registers of S.
constexpr bool EARLY_SCORES = HEAD_DIM == 64;

constexpr int STEPS_Q = TILE_Q / 16; ///< of 16-bit products that sum over a tile's queries

/// The first of a consuming warp's 16 keys is computed where it is asked for.
__device__ __forceinline__ int first_key_of_warp(const Params& p) {
  return reread_block_of_keys(p) * BLOCK_KV + reread_thread() / 32 * 16;
}

/// Forms P of the thread's scores, 0 where a query does not see a key.
__device__ __forceinline__ void recompute_p(float (&x)[COLUMNS8][4],
                                            const Scores::Sum (&sums)[COLUMNS8][4],
                                            const KeyHead& at, u32 rows, float key_scale,
                                            int first_query) {
  probabilities(x, sums, rows, key_scale);
  // Queries past the end have a ROW_SHIFT of infinity; of keys past it, and of one that is
  // separate, nothing is stored, but dQ sums over keys.
  const int warp_key = first_key_of_warp(at.p);
  if (needs_mask(at, tokens_from(first_query, TILE_Q), tokens_from(warp_key, 16)) ||
      warp_key < SINK_KEYS)
    mask(
        x,
        [&](int r, int column) {
          const int key = warp_key + lane_id() / 4 + 8 * r;
          return hidden(at, first_query + column, key) || key < SINK_KEYS;
        },
        0.0f);
}

/// A tile's P: for dV in 16 bits, and for dS in FP32. dS of a P that was rounded takes half an
/// instruction per score less, but dQ and dK of bf16 are then 0.0035 off the emulation, and 0.003
/// is the tests' limit.
struct Probabilities {
  u32 p16[STEPS_Q][4];
  float own[EARLY_SCORES ? COLUMNS8 : 1][4];

  /// Forms P of the thread's scores, whose registers it may take; 0 where a query does not see a
  /// key.
  __device__ __forceinline__ void take(Scores::Sum (&scores)[COLUMNS8][4], const KeyHead& at,
                                       u32 rows, float key_scale, int first_query) {
    float p[COLUMNS8][4];
    recompute_p(p, scores, at, rows, key_scale, first_query);
    pack_fragments<STEPS_Q>(p16, p);
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (EARLY_SCORES)
          own[j][i] = p[j][i];
        else
          scores[j][i] = __float_as_int(p[j][i]);
      }
    }
  }
  /// Word i of a fragment of 16 queries.
  __device__ __forceinline__ float2 two(const Scores::Sum (&scores)[COLUMNS8][4], int step,
                                        int i) const {
    const int j = 2 * step + i / 2, row = i % 2 * 2;
    if constexpr (EARLY_SCORES)
      return {own[j][row], own[j][row + 1]};
    else
      return {__int_as_float(scores[j][row]), __int_as_float(scores[j][row + 1])};
  }
};

/// Forms dS = P (dP - delta) in 16 bits.
__device__ __forceinline__ void form_ds(u32 (&ds16)[STEPS_Q][4], const Probabilities& probabilities,
                                        const Scores::Sum (&scores)[COLUMNS8][4],
                                        const float (&products)[COLUMNS8][4], u32 rows) {
#pragma unroll
  for (int pair = 0; pair < STEPS_Q; ++pair) {
    const float4 minus_deltas = read_columns(rows + ROW_MINUS_DELTA * TILE_Q * 4, pair);
    const float minus_delta[4] = {minus_deltas.x, minus_deltas.y, minus_deltas.z, minus_deltas.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) { // keys g and g + 8, of queries 2t and 2t + 1, then 8 further
      const float(&dp)[4] = products[2 * pair + i / 2];
      const int row = i % 2 * 2, column = i / 2 * 2;
      const float low = dp[row] + minus_delta[column], high = dp[row + 1] + minus_delta[column + 1];
      const float2 p = probabilities.two(scores, pair, i);
      ds16[pair][i] = pack<Element>(p.x * low, p.y * high);
    }
  }
}
