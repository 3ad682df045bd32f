//===- tile/math/query_gradients.cuh - From scores to P, with queries as rows --===//
#pragma once

#include "ptx/math.cuh"
#include "tile/dq/dq_ends.cuh"
#include "tile/math/mean_columns.cuh"
#include "tile/math/plain_score.cuh"
#include "tile/math/products.cuh"
#include "tile/walk/tiles.cuh"

constexpr int COLUMNS8 = TOKENS_PER_TILE / 8; ///< accumulators of one tile of 64 keys

/// These make exponents of a row's scores; lse is in log2 units.
struct ScoreRow {
  float scale, minus_lse;
};

/// A thread's rows g and g + 8 of its warp's queries.
struct OwnRows {
  int query[2];
  ScoreRow row[2];
  float minus_delta[2];
  float subtracted[2]; ///< from scores by K-smoothing, in log2 units, where they need it back

  /// From the query of row g on. Queries behind `last` are that one: a block may be longer than
  /// what is padded, and what its last rows read does not matter.
  __device__ __forceinline__ OwnRows(const Params& p, const QueryHead& at, int query_of_g,
                                     int last = 0x7fffffff) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      query[r] = minimum(query_of_g + 8 * r, last);
      const s64 first_row = at.padded_query();
      row[r] = {QK16 ? p.softmax_scale * LOG2_E
                     : read_row(p.q_rows, first_row, query[r], ROW_SCALE),
                -read_row(p.q_rows, first_row, query[r], ROW_SHIFT)};
      minus_delta[r] = read_row(p.q_rows, first_row, query[r], ROW_MINUS_DELTA);
      subtracted[r] = BENDS_SCORES && USES_MEAN
                          ? LOG2_E * read_row(p.q_rows, first_row, query[r], ROW_SINK)
                          : 0.0f;
    }
  }
};

/// Scores of 64 keys become probabilities, rows g and g + 8 by their own lse. `key_scales` are
/// those of the first and the second 32 keys, `mean_scores` what those of smoothed queries lack.
__device__ __forceinline__ void probabilities(float (*x)[4], const Scores::Sum (*sums)[4],
                                              const ScoreRow (&row)[2], float2 key_scales,
                                              const float* mean_scores = nullptr) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scale[2], addend[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = QK16 ? row[r].scale : row[r].scale * (half ? key_scales.y : key_scales.x);
      addend[r] = Scores::ZERO == 0 ? row[r].minus_lse
                                    : __fmaf_rn(-Scores::ZERO, scale[r], row[r].minus_lse);
    }
#pragma unroll
    for (int j = half * COLUMNS8 / 2; j < (half + 1) * COLUMNS8 / 2; ++j) {
      float2 of_mean = {0, 0};
      if constexpr (SMOOTH_Q)
        of_mean = mean_columns(mean_scores, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float exponent = __fmaf_rn(Scores::value(sums[j][i]), scale[i >> 1], addend[i >> 1]);
        x[j][i] = exp2_approx(SMOOTH_Q ? exponent + (i & 1 ? of_mean.y : of_mean.x) : exponent);
      }
    }
  }
}

/// With a score function: P times its slope, which is all that dS takes, of the keys from
/// `first_key` on.
__device__ __forceinline__ void sloped_probabilities(float (*x)[4], const Scores::Sum (*sums)[4],
                                                     const OwnRows& own, float2 key_scales,
                                                     const QueryHead& at, int first_key) {
  const Score score = {at.p, at.sequence(), at.head};
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i >> 1, key = first_key + 8 * j + 2 * (lane_id() & 3) + (i & 1);
      const float key_scale = j < COLUMNS8 / 2 ? key_scales.x : key_scales.y;
      const float of_row = own.row[r].scale * Score::GIVEN,
                  scale = QK16 ? of_row : of_row * key_scale;
      const float s = __fmaf_rn(Scores::value(sums[j][i]), scale,
                                __fmaf_rn(-Scores::ZERO, scale, own.subtracted[r] * Score::GIVEN));
      x[j][i] = exp2_approx(score.exponent(own.query[r], key, s) + own.row[r].minus_lse);
      if constexpr (BENDS_SCORES)
        x[j][i] *= score.slope(own.query[r], key, s);
    }
  }
}

/// Hidden keys have no probability.
__device__ __forceinline__ void hide(float (*x)[4], const KeysHiddenFrom<COLUMNS8>& hidden) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (hidden(i >> 1, j, i & 1))
        x[j][i] = 0;
    }
  }
}

/// Gives the vectors of scales of a scale block of keys, from the first channel that is summed
/// here.
__device__ __forceinline__ const float* scale_block_of(const QueryHead& at, int scale_block) {
  return at.p.kt8_scale +
         (at.first_key_scale_block<CHANNEL_TOKENS_KV>() + scale_block) *
             (CHANNEL_VECTORS * HEAD_DIM) +
         first_channel();
}
