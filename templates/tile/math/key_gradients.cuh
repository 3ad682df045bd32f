//===- tile/math/key_gradients.cuh - Sums of dK and dV: their units, and their end --===//
#pragma once

#include "ptx/convert.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/work/tiles.cuh"

/// INT8 products of a tile with 64 channels, dV's first.
constexpr int PRODUCTS_OF_DV = DV16 ? 0 : SUM_CHANNELS / 64;
constexpr int PRODUCTS = PRODUCTS_OF_DV + (DK16 ? 0 : SUM_CHANNELS / 64);

/// Of a run's units in shared memory: Q's scales, which dK is in, then dO's.
constexpr int VECTOR_BYTES = SHAPE.vector_bytes;
constexpr int UNITS_OF_Q = 0, UNITS_OF_DOUT = CHANNEL_VECTORS * VECTOR_BYTES;
constexpr int UNIT_BYTES = SHAPE.dkv_unit_bytes;

/// From the units at `last` to those at `next`.
__device__ __forceinline__ void change_units(Sums& dk, Sums& dv, u32 last, u32 next) {
  if constexpr (!DK16)
    dk.change_units(last + UNITS_OF_Q + CHANNEL_SCALE * VECTOR_BYTES,
                    next + UNITS_OF_Q + CHANNEL_INVERSE * VECTOR_BYTES);
  if constexpr (!DV16)
    dv.change_units(last + UNITS_OF_DOUT + CHANNEL_SCALE * VECTOR_BYTES,
                    next + UNITS_OF_DOUT + CHANNEL_INVERSE * VECTOR_BYTES);
}
/// The same by a warp alone, with a vector of its own.
__device__ __forceinline__ void change_units_of_warp(Sums& dk, Sums& dv, u32 ratios, u32 last,
                                                     u32 next) {
  if constexpr (!DK16)
    dk.change_units_of_warp(ratios, last + UNITS_OF_Q + CHANNEL_SCALE * VECTOR_BYTES,
                            next + UNITS_OF_Q + CHANNEL_INVERSE * VECTOR_BYTES);
  if constexpr (!DV16)
    dv.change_units_of_warp(ratios, last + UNITS_OF_DOUT + CHANNEL_SCALE * VECTOR_BYTES,
                            next + UNITS_OF_DOUT + CHANNEL_INVERSE * VECTOR_BYTES);
}
__device__ __forceinline__ void leave_units(Sums& dk, Sums& dv, u32 units) {
  if constexpr (!DK16)
    dk.multiply_columns(units + UNITS_OF_Q + CHANNEL_SCALE * VECTOR_BYTES);
  if constexpr (!DV16)
    dv.multiply_columns(units + UNITS_OF_DOUT + CHANNEL_SCALE * VECTOR_BYTES);
}

/// Where a head's gradients begin.
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
/// the pre-pass, a partial sum for each head and unit of queries.
template <int THREADS_HERE>
__device__ __forceinline__ void write_first_key(const KeyHead& at, const KeyGradients& to) {
  const int units = ceil_div(at.padded_q(), CHANNEL_TOKENS_Q);
  const int thread = IN_PAIRS ? threadIdx.x % THREADS_HERE : threadIdx.x;
  for (int i = thread; i < 2 * SUM_CHANNELS; i += THREADS_HERE) {
    const int place = i + (i / SUM_CHANNELS) * (HEAD_DIM - SUM_CHANNELS) + first_channel();
    float sum = 0;
    for (int head = at.kv_head * at.heads; head < (at.kv_head + 1) * at.heads; ++head) {
      const float* of_head =
          at.p.sink_partial + at.first_unit<CHANNEL_TOKENS_Q>(head) * (2 * HEAD_DIM) + place;
      for (int unit = 0; unit < units; ++unit)
        sum += of_head[unit * (2 * HEAD_DIM)];
    }
    const int channel = i % SUM_CHANNELS;
    const bool of_dv = i >= SUM_CHANNELS;
    if (!is_channel(first_channel() + channel, of_dv ? at.p.value_channels : at.p.channels))
      continue;
    (of_dv ? to.dv : to.dk)[channel].bits =
        static_cast<u16>(pack<Element>(of_dv ? sum : sum * at.p.softmax_scale, 0.0f));
  }
}
