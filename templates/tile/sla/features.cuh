//===- tile/sla/features.cuh - phi, the softmax over channels, as an operand ----===//
//
// This file forms phi(Q) and phi(K) of the linear branch. A warp forms those of 16 tokens of a tile
// in shared memory, in FP32, and rounds them to bf16: fragments of mma.sync's operand A.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/memory/fragments.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2; ///< of a token, and of a row of a matrix
constexpr int STEPS = HEAD_DIM / 16;    ///< along channels

/// 16 tokens by all channels: x[s] has those from 16 s on.
struct Rows16 {
  u32 x[STEPS][4];
};

/// Says which of rows g and g + 8 a fragment's word is of, and its first channel.
__device__ __forceinline__ int half_of_word(int word) { return word & 1; }
__device__ __forceinline__ int channel_of_word(int step, int word) {
  return step * 16 + word / 2 * 8 + (lane_id() & 3) * 2;
}

/// Two channels of a vector of all channels.
__device__ __forceinline__ float2 read_pair(u32 vector, int channel) {
  return read_float2(vector + channel * 4);
}

/// phi of rows `row` to `row + 15` of the tile, less the vector `mean` if `centred`. Rows at or
/// past `valid_rows` of the tile become zeros.
__device__ __forceinline__ void load_features(Rows16& features, u32 tile, int row, int valid_rows,
                                              bool centred, u32 mean) {
  const u32 lane_address = tile + a_lane_offset<ROW_BYTES>();
  float x[STEPS][4][2];
  float largest[2] = {-INFINITY_F, -INFINITY_F};
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    u32 words[4];
    load_fragment<ROW_BYTES>(words, lane_address, row, s);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack<Element>(words[w]);
      x[s][w][0] = pair.x, x[s][w][1] = pair.y;
    }
    if (centred) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 of = read_pair(mean, channel_of_word(s, w));
        x[s][w][0] -= of.x, x[s][w][1] -= of.y;
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float& most = largest[half_of_word(w)];
      most = max_number(most, max_number(x[s][w][0], x[s][w][1]));
    }
  }
  float sum[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h)
    largest[h] = quad_max_number(largest[h]) * LOG2_E;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[s][w][i] = exp2_approx(__fmaf_rn(x[s][w][i], LOG2_E, -largest[h]));
        sum[h] += x[s][w][i];
      }
    }
  }
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool valid = row + lane_id() / 4 + 8 * h < valid_rows;
    inverse[h] = __fdiv_rn(1.0f, quad_sum(sum[h]));
    inverse[h] = valid ? inverse[h] : 0.0f;
  }
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float factor = inverse[half_of_word(w)];
      features.x[s][w] = pack<bf16>(x[s][w][0] * factor, x[s][w][1] * factor);
    }
  }
}

/// For rows g and g + 8 this computes u = phi(Q) . Z from rounded features. Where no key is left, Z
/// and all products are zeros, and u is 1.
__device__ __forceinline__ void normalisers(float (&u)[2], const Rows16& features, u32 norms) {
  bool any = false;
  u[0] = u[1] = 0;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 z = read_pair(norms, channel_of_word(s, w));
      const float2 f = unpack<bf16>(features.x[s][w]);
      float& sum = u[half_of_word(w)];
      sum = __fmaf_rn(f.x, z.x, __fmaf_rn(f.y, z.y, sum));
      any |= z.x != 0 || z.y != 0; // NaN too
    }
  }
  const bool left = __any_sync(~0u, any);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u[h] = quad_sum(u[h]);
    u[h] = left ? u[h] : 1.0f;
  }
}
