//===- layouts/forward_ws.cuh - Shared memory of kernels/forward_ws.cuh ---===//
#pragma once

#include "layouts/block_shape.cuh"

struct ForwardWsLayout : BlockShape {
  constexpr explicit ForwardWsLayout(const BlockShape& s) : BlockShape(s) {}
  int query_stages = lists ? 2 : 1; ///< blocks of queries
  int queries = 0;
  int keys = queries + query_stages * block_q * head_dim;
  int keys_bytes = group_kv * head_dim;
  int values = keys + stages * keys_bytes;
  int values_bytes = head_dim * group_kv;
  int key_scales = values + stages * values_bytes;
  int channel_scales = key_scales + stages * KEY_SCALES_BYTES; ///< buffers of channels' scales
  int channel_scales_bytes = block_scales ? 0 : CHANNEL_VECTORS * head_dim * 4;
  int scale_buffers =
      block_scales ? 1 : scale_buffers_of(stages, lists ? 1 : channel_tokens_kv / group_kv);
  int ratios = channel_scales + scale_buffers * channel_scales_bytes; ///< of scales, for each warp
  int magics = ratios + (block_scales ? 0 : block_q / 16 * head_dim * 4);
  int barriers = magics + MAGIC_PRODUCT_BYTES;
  int queries_came = barriers + ring_bytes(stages); ///< with lists a ring's barriers
  int messages = queries_came + (lists ? ring_bytes(query_stages) : BARRIER_BYTES); ///< of stages
  int message_bytes = 4; ///< TileMessage's
  int total = messages + (lists ? stages * message_bytes : 0);
};
