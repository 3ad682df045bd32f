//===- tile/math/mean_gradients.cuh - What dK by smoothed queries lacks -----------===//
//
// Under SMOOTH_Q the INT8 copy of Q for dK is without the mean of its scale block, which is a run
// of the walk. So dK lacks that mean times the sum of each key's dS over the run, before dS is
// quantised.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/key_gradients.cuh"
#include "tile/math/quantizer.cuh"

/// The sums of dS of a thread's columns, of keys g and g + 8.
struct MeanGradients {
  static constexpr bool NEEDED = SMOOTH_Q && !DK16;
  float sum[2] = {0, 0};

  /// The mean of a tile's queries, from the first channel that is summed here.
  static __device__ __forceinline__ const float* mean_of(const KeyHead& at, const QueryTile& tile) {
    if constexpr (!NEEDED)
      return nullptr;
    const s64 scale_block = at.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.run();
    return at.p.q_mean + scale_block * HEAD_DIM + first_channel();
  }
  template <int COLUMNS8> __device__ __forceinline__ void take(const float (&ds)[COLUMNS8][4]) {
    if constexpr (NEEDED) {
#pragma unroll
      for (int j = 0; j < COLUMNS8; ++j) {
        sum[0] += ds[j][0] + ds[j][1];
        sum[1] += ds[j][2] + ds[j][3];
      }
    }
  }
  /// Adds them at a run's end to sums in the scales at `channel_scales`. The bias is subtracted
  /// first: beside it a mean's part would be rounded to levels of what is left of the queries,
  /// which may be nothing.
  __device__ __forceinline__ void add_to(Sums& dk, const float* mean, u32 channel_scales) {
    if constexpr (NEEDED) {
      sum[0] = quad_sum(sum[0]);
      sum[1] = quad_sum(sum[1]);
#pragma unroll
      for (int j = 0; j < SUM_CHANNELS / 8; ++j) {
        float2 x = __ldg(reinterpret_cast<const float2*>(mean + 8 * j + 2 * (lane_id() & 3)));
        if constexpr (DKV_HAS_CHANNEL_SCALES) {
          const float4 inverse =
              read_columns(channel_scales + SCALES_OF_Q + CHANNEL_INVERSE * VECTOR_BYTES, j / 2);
          x.x *= j % 2 ? inverse.z : inverse.x;
          x.y *= j % 2 ? inverse.w : inverse.y;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dk.x[j][i] = __fmaf_rn(sum[i >> 1], i & 1 ? x.y : x.x, dk.x[j][i] - dk.bias[i >> 1]);
      }
      dk.bias[0] = dk.bias[1] = 0;
      sum[0] = sum[1] = 0;
    }
  }
};
