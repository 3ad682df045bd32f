//===- layouts/backward_dq_pair.cuh - Shared memory of kernels/backward_dq_pair.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

/// A step's 128 keys are two halves, one behind the other in a stage.
struct BackwardDqPairLayout : BlockShape {
  constexpr explicit BackwardDqPairLayout(const BlockShape& s) : BlockShape(s) {}
  int half_keys = TOKENS_PER_TILE;
  int ones = 0;
  int queries = ones + ROW_START_BYTES;
  int dout = queries + block_q * head_dim;
  int keys = dout + block_q * value_row;
  int half_keys_bytes = half_keys * head_dim;
  int values = keys + stages * 2 * half_keys_bytes;
  int half_values_bytes = half_keys * value_row;
  int summed = values + 2 * half_values_bytes; ///< keys that dS meets
  int half_summed_bytes = half_keys * (dq16 ? value_row : head_dim);
  int score_gradients = summed + 2 * half_summed_bytes;
  int fragments = half_keys / (dq16 ? 16 : 32); ///< of dS of one half
  int half_gradients_bytes = fragments * FRAGMENT_BYTES;
  int channel_scales = score_gradients + 2 * half_gradients_bytes;
  /// They are one warpgroup's channels': scales, then inverses, of what dQ is in and of what comes
  /// next.
  int channel_scales_bytes = dq_has_channel_scales ? CHANNEL_VECTORS * vector_bytes : 0;
  int scale_buffers = 2;
  int ratios = channel_scales + 2 * scale_buffers * channel_scales_bytes; ///< for each of 8 warps
  int maxima = ratios + (dq_has_channel_scales ? 8 * vector_bytes : 0);
  int key_scales = maxima + (dq16 ? 0 : 2 * block_q * 4);
  int key_barriers = key_scales + stages * 2 * KEY_SCALES_BYTES; ///< each half has all scales
  int value_barriers = key_barriers + 2 * ring_bytes(stages);
  int summed_barriers = value_barriers + 2 * ring_bytes(1);
  int rows_came = summed_barriers + ring_bytes(1);
  int total = rows_came + BARRIER_BYTES;
};
