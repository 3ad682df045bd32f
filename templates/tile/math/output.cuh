//===- tile/math/output.cuh - O from its beginning to its end --------------------===//
#pragma once

#include "ptx/math.cuh"
#include "tile/math/softmax.cuh"
#include "tile/math/values_as_given.cuh"

/// A run has the groups whose channels share scales, a scale block. Under `block`, where those are
/// one number by which beta is multiplied, it has as many as leave O's bias small.
constexpr int GROUPS_A_RUN = BLOCK_SCALES ? 8 : CHANNEL_TOKENS_KV / GROUP_KV;

/// Gives the scales of V's transposed copy, of a scale block of the head's keys.
__device__ __forceinline__ const float* channel_scales_of(const Params& p, const QueryHead& at,
                                                          int scale_block) {
  return p.vt8_scale +
         (at.first_key_scale_block<CHANNEL_TOKENS_KV>() + scale_block) * (VALUE_VECTORS * HEAD_DIM);
}

/// What V's copy lacks of a thread's columns of one n8 tile of a pair: 0, or the head's mean.
__device__ __forceinline__ float2 value_mean(const float* channel_scales, int pair, int half) {
  if constexpr (!SMOOTH_V) {
    return {0, 0};
  } else {
    const float4 mean = read_columns(channel_scales + CHANNEL_MEAN * HEAD_DIM, pair);
    return half == 0 ? float2{mean.x, mean.y} : float2{mean.z, mean.w};
  }
}

/// O starts from V_0 over the scales of its channels, times P's 255, where key 0 is separate.
__device__ __forceinline__ void start_from_sink(Sums& o, const Params& p, const QueryHead& at) {
  const Element* value = p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h;
  const float* channel_scales = channel_scales_of(p, at, 0);
  const int t = reread_thread() & 3;
  const float* inverse = channel_scales + CHANNEL_INVERSE * HEAD_DIM + t * 4;
#pragma unroll
  for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
    const float4 levels = __ldg(reinterpret_cast<const float4*>(inverse + pair * 16));
    const float factor[4] = {levels.x, levels.y, levels.z, levels.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int octet = pair * 16 + half * 8;
      const float2 v =
          unpack<Element>(is_channel(octet, p.value_channels)
                              ? __ldg(reinterpret_cast<const u32*>(value + octet + t * 2))
                              : 0);
      float(&x)[4] = o.x[2 * pair + half];
      const float2 mean = value_mean(channel_scales, pair, half);
      x[0] = x[2] = (v.x - mean.x) * factor[2 * half] * UNSIGNED_LEVELS;
      x[1] = x[3] = (v.y - mean.y) * factor[2 * half + 1] * UNSIGNED_LEVELS;
    }
  }
}

/// The end: lse, and O over its rows' sums, of the block's queries from `first_query` on.
__device__ __forceinline__ void store(const Params& p, const SoftmaxRows& rows, Sums& o,
                                      int first_query = block_of_queries() * BLOCK_Q) {
  const QueryHead at = reread_query_head(p);
  const int thread = reread_thread(), quad_lane = thread & 3;
  const int warp_query = first_query + thread / 32 * 16;
  float inverse_sum[2];
  bool counts[2], is_nan = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = warp_query + (thread & 31) / 4 + 8 * r;
    const float sum = known_sum(quad_sum(rows.sum[r]), at, query);
    const bool fully_masked = sees_nothing(at, query, sum);
    inverse_sum[r] = __fdiv_rn(1.0f, sum);
    if constexpr (MAX_LOGITS || SMOOTH_V)
      counts[r] = query < at.seq_q() && !fully_masked;
    if (fully_masked) {
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 8; ++j)
        o.x[j][2 * r] = o.x[j][2 * r + 1] = 0;
      inverse_sum[r] = 0;
    }
    if (quad_lane == 0 && query < at.seq_q()) {
      float lse = LN_2 * (rows.reference[r] + log2_approx(sum) - LOG2_UNSIGNED_LEVELS);
      if constexpr (USES_MEAN && !BENDS_SCORES) // back to the raw domain
        lse += read_row(p.q_rows, at.padded_query(), query, ROW_SHIFT);
      p.lse[at.first_row() + query] = fully_masked ? -INFINITY_F : lse;
      if constexpr (MAX_LOGITS)
        is_nan = is_nan || (!fully_masked && lse != lse);
    }
  }
  if constexpr (MAX_LOGITS)
    rows.max_logit.end(at, warp_query, counts, is_nan);
  if constexpr (SMOOTH_V) {
    const float* channel_scales = channel_scales_of(p, at, 0);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
      const float2 mean = value_mean(channel_scales, j / 2, j % 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i >> 1;
        o.x[j][i] = counts[r] ? __fmaf_rn(o.x[j][i], inverse_sum[r], i & 1 ? mean.y : mean.x) : 0;
      }
    }
    inverse_sum[0] = inverse_sum[1] = 1;
  }
  store_rows(p.out + at.first_query(p.out_stride_b, p.out_stride_s) + at.head * p.out_stride_h +
                 warp_query * p.out_stride_s,
             p.out_stride_s, at.seq_q() - warp_query, p.value_channels, o.x, inverse_sum[0],
             inverse_sum[1]);
}

/// Stores what the block's queries of a sequence without keys get. Apart: it takes no registers of
/// loops.
__device__ __noinline__ void store_empty(const Params& p) {
  const QueryHead at = query_head(p);
  const int first = block_of_queries() * BLOCK_Q, count = minimum(BLOCK_Q, at.seq_q() - first);
  store_zeros(p.out + at.first_query(p.out_stride_b, p.out_stride_s) + at.head * p.out_stride_h +
                  first * p.out_stride_s,
              p.out_stride_s, count, p.value_channels);
  for (int i = threadIdx.x; i < count; i += THREADS)
    p.lse[at.first_row() + first + i] = -INFINITY_F;
}
