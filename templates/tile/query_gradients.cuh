//===- tile/query_gradients.cuh - From scores to P, and where dQ begins and ends ===//
#pragma once

#include "ptx/math.cuh"
#include "tile/group_walk.cuh"
#include "tile/products.cuh"

constexpr int COLUMNS8 = TOKENS_PER_TILE / 8; ///< accumulators of one tile of keys
/// Whether channels of K^T have units (tile/accumulators.cuh).
constexpr bool HAS_UNITS = !DQ16 && !BLOCK_SCALES;

/// What makes exponents of a row's scores; lse in log2 units.
struct ScoreRow {
  float scale, minus_lse;
};

/// Scores become probabilities, rows g and g + 8 by their own lse. `key_scales` are those of the
/// first and the second 32 keys.
__device__ __forceinline__ void probabilities(float (&x)[COLUMNS8][4],
                                              const Scores::Sum (&sums)[COLUMNS8][4],
                                              const ScoreRow (&row)[2], float2 key_scales) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scale[2], addend[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = QK16 ? row[r].scale : row[r].scale * (half ? key_scales.y : key_scales.x);
      addend[r] = QK16 ? row[r].minus_lse : __fmaf_rn(-Scores::ZERO, scale[r], row[r].minus_lse);
    }
#pragma unroll
    for (int j = half * COLUMNS8 / 2; j < (half + 1) * COLUMNS8 / 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] = exp2_approx(__fmaf_rn(Scores::value(sums[j][i]), scale[i >> 1], addend[i >> 1]));
    }
  }
}

/// Hidden keys have no probability.
__device__ __forceinline__ void hide(float (&x)[COLUMNS8][4], const HiddenKeys& hidden) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (hidden(i >> 1, j, i & 1))
        x[j][i] = 0;
    }
  }
}

/// dQ begins with key 0's share, in the units that sums are in: its dS times its row of K, which is
/// smoothed where the INT8 copy is.
__device__ __forceinline__ void begin_with_sink(const Params& p, Sums& dq, const QueryHead& at,
                                                const int (&query)[2], const float* inverses) {
  const int channel = (lane_id() & 3) * 2;
  const Element* key = p.k + at.first_key(p.k_stride_b) + at.kv_head * p.k_stride_h + channel;
  const float* mean = p.k_mean + at.flat_kv_head * HEAD_DIM + channel;
  float gradient[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    gradient[r] = sees_nothing(at, query[r])
                      ? 0.0f
                      : read_row(p.q_rows, at.padded_query(), query[r], ROW_SINK);
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; ++j) {
    float2 x = unpack<Element>(*reinterpret_cast<const u32*>(key + 8 * j));
    if constexpr (SMOOTH_K) {
      x.x -= mean[8 * j];
      x.y -= mean[8 * j + 1];
    }
    if constexpr (HAS_UNITS) {
      const float4 inverse = read_columns(inverses, j / 2);
      x.x *= j % 2 ? inverse.z : inverse.x;
      x.y *= j % 2 ? inverse.w : inverse.y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      dq.x[j][2 * r] = gradient[r] * x.x;
      dq.x[j][2 * r + 1] = gradient[r] * x.y;
    }
  }
}

/// The vectors of scales of a unit of keys.
__device__ __forceinline__ const float* unit_of(const QueryHead& at, int unit) {
  return at.p.kt8_scale +
         (at.first_key_unit<CHANNEL_TOKENS_KV>() + unit) * (CHANNEL_VECTORS * HEAD_DIM);
}

/// With a gradient through lse the rows of dS no longer sum to zero but to dlse, and the mean that
/// K-smoothing took off counts.
__device__ __forceinline__ void add_mean(const Params& p, float (&dq)[HEAD_DIM / 8][4],
                                         const QueryHead& at, int row) {
  const float* mean = p.k_mean + at.flat_kv_head * HEAD_DIM + (lane_id() & 3) * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r, row += 8) {
    if (row >= at.seq_q() || sees_nothing(at, row))
      continue;
    const float gradient = p.dlse[at.first_row() + row];
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
      dq[j][2 * r] += gradient * mean[8 * j];
      dq[j][2 * r + 1] += gradient * mean[8 * j + 1];
    }
  }
}

/// What is computed from here on alone does not take registers over the loops.
__device__ __forceinline__ void finish_dq(const Params& p, float (&dq)[HEAD_DIM / 8][4]) {
  const QueryHead at = query_head_anew(p);
  const int warp_query = block_of_queries_anew() * BLOCK_Q + read_thread_anew() / 32 * 16;
  if constexpr (SMOOTH_K) {
    if (p.dlse != nullptr)
      add_mean(p, dq, at, warp_query + (lane_id() >> 2));
  }
  store_rows(p.dq + at.first_query(p.dq_stride_b) + at.head * p.dq_stride_h +
                 warp_query * p.dq_stride_s,
             p.dq_stride_s, at.seq_q() - warp_query, dq, p.softmax_scale, p.softmax_scale);
}
