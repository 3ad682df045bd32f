//===- tile/math/key_gradients.cuh - Sums of dK and dV: their scales, and their end --===//
#pragma once

#include "ptx/convert.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/walk/tiles.cuh"

/// INT8 products of a tile with 64 channels, dV's first.
constexpr int PRODUCTS_OF_DV = DV16 ? 0 : SUM_CHANNELS / 64;
constexpr int PRODUCTS = PRODUCTS_OF_DV + (DK16 ? 0 : SUM_CHANNELS / 64);

/// A run's buffer in shared memory holds Q's scales, which dK is in, then dO's.
constexpr int VECTOR_BYTES = SHAPE.vector_bytes;
constexpr int SCALES_OF_Q = 0, SCALES_OF_DOUT = CHANNEL_VECTORS * VECTOR_BYTES;
constexpr int CHANNEL_SCALES_BYTES = SHAPE.dkv_channel_scales_bytes;

/// Rescales both from the scales at `last` to those at `next`.
__device__ __forceinline__ void rescale_columns(Sums& dk, Sums& dv, u32 last, u32 next) {
  if constexpr (!DK16)
    dk.rescale_columns(last + SCALES_OF_Q + CHANNEL_SCALE * VECTOR_BYTES,
                       next + SCALES_OF_Q + CHANNEL_INVERSE * VECTOR_BYTES);
  if constexpr (!DV16)
    dv.rescale_columns(last + SCALES_OF_DOUT + CHANNEL_SCALE * VECTOR_BYTES,
                       next + SCALES_OF_DOUT + CHANNEL_INVERSE * VECTOR_BYTES);
}
/// Rescales by a warp alone, with a vector of its own.
__device__ __forceinline__ void rescale_columns_of_warp(Sums& dk, Sums& dv, u32 ratios, u32 last,
                                                        u32 next) {
  if constexpr (!DK16)
    dk.rescale_columns_of_warp(ratios, last + SCALES_OF_Q + CHANNEL_SCALE * VECTOR_BYTES,
                               next + SCALES_OF_Q + CHANNEL_INVERSE * VECTOR_BYTES);
  if constexpr (!DV16)
    dv.rescale_columns_of_warp(ratios, last + SCALES_OF_DOUT + CHANNEL_SCALE * VECTOR_BYTES,
                               next + SCALES_OF_DOUT + CHANNEL_INVERSE * VECTOR_BYTES);
}
__device__ __forceinline__ void apply_channel_scales(Sums& dk, Sums& dv, u32 channel_scales) {
  if constexpr (!DK16)
    dk.multiply_columns(channel_scales + SCALES_OF_Q + CHANNEL_SCALE * VECTOR_BYTES);
  if constexpr (!DV16)
    dv.multiply_columns(channel_scales + SCALES_OF_DOUT + CHANNEL_SCALE * VECTOR_BYTES);
}

/// Gives where a head's gradients begin.
struct KeyGradients {
  Element *dk, *dv;
};
/// Stores this warp's keys, from `first_key` of the head on.
__device__ __forceinline__ KeyGradients store_key_gradients(const Params& p, const KeyHead& at,
                                                            int first_key, const Sums& dk,
                                                            const Sums& dv) {
  const KeyGradients to = {p.dk + at.first_key(p.dk_stride_b, p.dk_stride_s) +
                               at.kv_head * p.dk_stride_h + first_channel(),
                           p.dv + at.first_key(p.dv_stride_b, p.dv_stride_s) +
                               at.kv_head * p.dv_stride_h + first_channel()};
  const int left = at.seq_kv() - first_key;
  store_rows(to.dk + first_key * p.dk_stride_s, p.dk_stride_s, left, p.channels, dk.x,
             p.softmax_scale, p.softmax_scale);
  store_rows(to.dv + first_key * p.dv_stride_s, p.dv_stride_s, left, p.value_channels, dv.x, 1.0f,
             1.0f);
  return to;
}

/// Key 0's gradients, over those of its row, which some of the first THREADS_HERE threads (of each
/// of a pair's warpgroups), all of which call this, have stored before a barrier: they come from
/// the pre-pass, a partial sum for each head and scale block of queries.
template <int THREADS_HERE>
__device__ __forceinline__ void write_first_key(const KeyHead& at, const KeyGradients& to) {
  const int channel_scales = ceil_div(at.padded_q(), CHANNEL_TOKENS_Q);
  const int thread = IN_PAIRS ? threadIdx.x % THREADS_HERE : threadIdx.x;
  for (int i = thread; i < 2 * SUM_CHANNELS; i += THREADS_HERE) {
    const int place = i + (i / SUM_CHANNELS) * (HEAD_DIM - SUM_CHANNELS) + first_channel();
    float sum = 0;
    for (int head = at.kv_head * at.heads; head < (at.kv_head + 1) * at.heads; ++head) {
      const float* of_head =
          at.p.sink_partial + at.first_scale_block<CHANNEL_TOKENS_Q>(head) * (2 * HEAD_DIM) + place;
      for (int scale_block = 0; scale_block < channel_scales; ++scale_block)
        sum += of_head[scale_block * (2 * HEAD_DIM)];
    }
    const int channel = i % SUM_CHANNELS;
    const bool of_dv = i >= SUM_CHANNELS;
    if (!is_channel(first_channel() + channel, of_dv ? at.p.value_channels : at.p.channels))
      continue;
    (of_dv ? to.dv : to.dk)[channel].bits =
        static_cast<u16>(pack<Element>(of_dv ? sum : sum * at.p.softmax_scale, 0.0f));
  }
}
