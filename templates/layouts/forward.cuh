//===- layouts/forward.cuh - Shared memory of kernels/forward.cuh ---------===//
#pragma once

#include "layouts/block_shape.cuh"

struct ForwardLayout : BlockShape {
  constexpr explicit ForwardLayout(const BlockShape& s) : BlockShape(s) {}
  int queries = 0;
  int keys = queries + block_q * score_row;
  int keys_bytes = group_kv * score_row;
  int values = keys + stages * keys_bytes;
  int values_bytes = head_dim * group_kv;
  int channel_scales = values + stages * values_bytes;
  int channel_scales_bytes = CHANNEL_VECTORS * head_dim * 4;
  int scale_buffers = 2; ///< runs whose scales are there: this one, and the next
  int total = channel_scales + (block_scales ? 0 : scale_buffers * channel_scales_bytes);
};
