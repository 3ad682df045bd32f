//===- layouts/backward_dq_ws.cuh - Shared memory of kernels/backward_dq_ws.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

struct BackwardDqWsLayout : BlockShape {
  constexpr explicit BackwardDqWsLayout(const BlockShape& s) : BlockShape(s) {}
  /// Keys of a step. Those that share a scale of dS are known together; in 16 bits none do.
  int step_keys = dq16 ? 2 * TOKENS_PER_TILE : group_kv;
  int steps_a_run = dq_has_channel_scales ? channel_tokens_kv / step_keys : 1;
  /// Before all else: a product is taken to read all of a matrix, of which there is one row.
  int ones = 0;
  int queries = ones + ROW_START_BYTES;
  int dout = queries + block_q * head_dim;
  int keys = dout + block_q * value_row;
  int keys_bytes = step_keys * head_dim;
  int values = keys + stages * keys_bytes;
  int values_bytes = step_keys * value_row;
  int summed = values + stages * values_bytes; ///< keys that dS meets
  int summed_bytes = step_keys * (dq16 ? value_row : head_dim);
  int key_scales = summed + stages * summed_bytes;
  int channel_scales = key_scales + stages * KEY_SCALES_BYTES; ///< buffers of channels' scales
  int channel_scales_bytes = dq_has_channel_scales ? CHANNEL_VECTORS * head_dim * 4 : 0;
  int scale_buffers = scale_buffers_of(stages, lists ? 1 : steps_a_run);
  int ratios = channel_scales + scale_buffers * channel_scales_bytes; ///< of scales, for each warp
  int barriers = ratios + (dq_has_channel_scales ? block_q / 16 * head_dim * 4 : 0);
  int rows_came = barriers + ring_bytes(stages);
  int total = rows_came + BARRIER_BYTES;
};
