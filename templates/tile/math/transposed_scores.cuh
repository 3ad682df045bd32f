//===- tile/math/transposed_scores.cuh - S^T, whose columns are queries ----------===//
#pragma once

#include "ptx/math.cuh"
#include "tile/math/plain_score.cuh"
#include "tile/math/products.cuh"
#include "tile/walk/mask.cuh"

constexpr int TILE_Q = TOKENS_PER_TILE; ///< queries that are worked on at a time
constexpr int COLUMNS8 = TILE_Q / 8;
constexpr int SLOPES = BENDS_SCORES ? COLUMNS8 : 1; ///< by which a score function multiplies dS

/// Scores become probabilities: columns by their queries' scales and lse, among the vectors `rows`.
/// Those of smoothed queries lack `mean_scores`, of keys g and g + 8.
__device__ __forceinline__ void probabilities(float (&x)[COLUMNS8][4],
                                              const Scores::Sum (&sums)[COLUMNS8][4], u32 rows,
                                              float key_scale, float2 mean_scores = {0, 0}) {
#pragma unroll
  for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
    const float4 lses = read_columns(rows + ROW_SHIFT * TILE_Q * 4, pair);
    float addend[4] = {-lses.x, -lses.y, -lses.z, -lses.w};
    float scale[4] = {key_scale, key_scale, key_scale, key_scale};
    if constexpr (!QK16) {
      const float4 scales = read_columns(rows + ROW_SCALE * TILE_Q * 4, pair);
      const float of_query[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scale[i] *= of_query[i];
        if constexpr (Scores::ZERO != 0)
          addend[i] = __fmaf_rn(-Scores::ZERO, scale[i], addend[i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 2 * half + (i & 1), j = 2 * pair + half;
        const float exponent = __fmaf_rn(Scores::value(sums[j][i]), scale[column], addend[column]);
        x[j][i] =
            exp2_approx(SMOOTH_Q ? exponent + (i < 2 ? mean_scores.x : mean_scores.y) : exponent);
      }
    }
  }
}

/// With a score function of a query head: P, and where that bends scores its slopes, of keys g and
/// g + 8 and the queries from `first_query` on.
__device__ __forceinline__ void scored_probabilities(float (&x)[COLUMNS8][4],
                                                     float (&slope)[SLOPES][4],
                                                     const Scores::Sum (&sums)[COLUMNS8][4],
                                                     u32 rows, float key_scale, const Score& score,
                                                     const int (&key)[2], int first_query) {
#pragma unroll
  for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
    const float4 lses = read_columns(rows + ROW_SHIFT * TILE_Q * 4, pair);
    const float4 scales = read_columns(rows + ROW_SCALE * TILE_Q * 4, pair);
    const float lse[4] = {lses.x, lses.y, lses.z, lses.w};
    const float of_query[4] = {scales.x, scales.y, scales.z, scales.w};
    float subtracted[4] = {};
    if constexpr (BENDS_SCORES && USES_MEAN) {
      const float4 shifts = read_columns(rows + ROW_SINK * TILE_Q * 4, pair);
      subtracted[0] = shifts.x, subtracted[1] = shifts.y;
      subtracted[2] = shifts.z, subtracted[3] = shifts.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 2 * half + (i & 1), j = 2 * pair + half;
        const int query = first_query + 8 * j + 2 * (lane_id() & 3) + (i & 1);
        const float of_key = key_scale * Score::GIVEN,
                    scale = QK16 ? of_key : of_key * of_query[column];
        const float s =
            __fmaf_rn(Scores::value(sums[j][i]), scale,
                      __fmaf_rn(-Scores::ZERO, scale, LOG2_E * Score::GIVEN * subtracted[column]));
        x[j][i] = exp2_approx(score.exponent(query, key[i >> 1], s) - lse[column]);
        if constexpr (SLOPES == COLUMNS8)
          slope[j][i] = score.slope(query, key[i >> 1], s);
      }
    }
  }
}

/// Whether queries end within a tile. A score function may make anything of those past the end.
__device__ __forceinline__ bool ends_in_tile(const Sequence& at, int first_query) {
  return HAS_SCORE && first_query + TILE_Q > at.seq_q();
}
/// Whether a query is one of those.
__device__ __forceinline__ bool is_past_end(const Sequence& at, int query) {
  return HAS_SCORE && query >= at.seq_q();
}
/// Takes P out where it is hidden, and slopes, which need not be finite there.
template <typename Hidden>
__device__ __forceinline__ void hide(float (&p)[COLUMNS8][4], float (&slope)[SLOPES][4],
                                     const Hidden& is_hidden) {
  mask(p, is_hidden, 0.0f);
  if constexpr (SLOPES == COLUMNS8)
    mask(slope, is_hidden, 0.0f);
}

/// Multiplies what has slopes by them.
__device__ __forceinline__ void multiply(float (&x)[COLUMNS8][4], const float (&slope)[SLOPES][4]) {
#pragma unroll
  for (int j = 0; j < SLOPES; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[j][i] *= slope[j][i];
  }
}

/// The largest P of rows g and g + 8, NaN above all. Floats that are not negative are in the order
/// of their bits, of which there are maxima of three.
__device__ __forceinline__ void largest_probabilities(const float (&x)[COLUMNS8][4],
                                                      float (&largest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int bits = 0;
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j)
      bits = maximum(maximum(bits, __float_as_int(x[j][2 * r])), __float_as_int(x[j][2 * r + 1]));
    largest[r] = __int_as_float(bits);
  }
}
