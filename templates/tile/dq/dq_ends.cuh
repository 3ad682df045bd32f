//===- tile/dq/dq_ends.cuh - What a warp's dQ begins with, and where it goes ---===//
#pragma once

#include "tile/math/accumulators.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/visible.cuh"

/// Whether dQ is in units of the scales of channels of K^T (tile/math/accumulators.cuh).
constexpr bool DQ_HAS_CHANNEL_SCALES = SHAPE.dq_has_channel_scales;

/// dQ begins with the share of the attention sink, key 0, in the units that sums are in: its dS
/// times its row of K, which is smoothed where the INT8 copy is.
__device__ __forceinline__ void begin_with_sink(const Params& p, Sums& dq, const QueryHead& at,
                                                const int (&query)[2], const float* inverses) {
  const int channel = first_channel() + (lane_id() & 3) * 2;
  const Element* key =
      p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h + channel;
  const float* mean = p.k_mean + at.mean_row() * HEAD_DIM + channel;
  float gradient[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    gradient[r] = sees_nothing(at, query[r])
                      ? 0.0f
                      : read_row(p.q_rows, at.padded_query(), query[r], ROW_SINK);
#pragma unroll
  for (int j = 0; j < SUM_CHANNELS / 8; ++j) {
    const bool there = is_channel(first_channel() + 8 * j, p.channels);
    float2 x = unpack<Element>(there ? *reinterpret_cast<const u32*>(key + 8 * j) : 0);
    if constexpr (SMOOTH_K) {
      x.x -= mean[8 * j];
      x.y -= mean[8 * j + 1];
    }
    if constexpr (DQ_HAS_CHANNEL_SCALES) {
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

/// Whether rows of dS sum to something that only the kernel knows: a score function's slope
/// multiplies them.
constexpr bool SUMS_DS = SMOOTH_K && BENDS_SCORES;

template <int COLUMNS8>
__device__ __forceinline__ void add_rows(float (&sum)[2], const float (&x)[COLUMNS8][4]) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[i >> 1] += x[j][i];
  }
}

/// With a gradient through lse the rows of dS no longer sum to zero but to dlse, and with SUMS_DS
/// to ds_sum of a quad's threads. The mean that K-smoothing took off then counts.
__device__ __forceinline__ void add_mean(const Params& p, float (&dq)[SUM_CHANNELS / 8][4],
                                         const QueryHead& at, int row, const float* ds_sum) {
  const float* mean = p.k_mean + at.mean_row() * HEAD_DIM + first_channel() + (lane_id() & 3) * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r, row += 8) {
    const float of_quad = SUMS_DS ? quad_sum(ds_sum[r]) : 0;
    if (row >= at.seq_q() ||
        saw_nothing(at, row, [&] { return read_row(p.q_rows, at.padded_query(), row, ROW_SHIFT); }))
      continue;
    const float gradient = SUMS_DS ? of_quad : p.dlse[at.first_row() + row];
#pragma unroll
    for (int j = 0; j < SUM_CHANNELS / 8; ++j) {
      dq[j][2 * r] += gradient * mean[8 * j];
      dq[j][2 * r + 1] += gradient * mean[8 * j + 1];
    }
  }
}

/// What only the end needs is computed here, so that it takes no registers over the loops.
__device__ __forceinline__ void finish_dq(const Params& p, float (&dq)[SUM_CHANNELS / 8][4],
                                          const float* ds_sum = nullptr) {
  const QueryHead at = reread_query_head(p);
  const int warp_query = reread_block_of_queries() * BLOCK_Q + first_token_of_warp(reread_thread());
  if constexpr (SMOOTH_K) {
    if (SUMS_DS || p.dlse != nullptr)
      add_mean(p, dq, at, warp_query + (lane_id() >> 2), ds_sum);
  }
  store_rows(p.dq + at.first_query(p.dq_stride_b, p.dq_stride_s) + at.head * p.dq_stride_h +
                 warp_query * p.dq_stride_s + first_channel(),
             p.dq_stride_s, at.seq_q() - warp_query, p.channels, dq, p.softmax_scale,
             p.softmax_scale);
}

/// Stores what the block's queries of a sequence without keys get. Apart: it takes no registers of
/// loops.
__device__ __noinline__ void store_empty(const Params& p) {
  const QueryHead at = query_head(p);
  const int first = block_of_queries() * BLOCK_Q;
  store_zeros(p.dq + at.first_query(p.dq_stride_b, p.dq_stride_s) + at.head * p.dq_stride_h +
                  first * p.dq_stride_s,
              p.dq_stride_s, minimum(BLOCK_Q, at.seq_q() - first), p.channels);
}
