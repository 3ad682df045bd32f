//===- layouts/forward_ws.cuh - Shared memory of kernels/forward_ws.cuh ---===//
#pragma once

#include "layouts/block_shape.cuh"

struct ForwardWsLayout : BlockShape {
  constexpr explicit ForwardWsLayout(const BlockShape& s) : BlockShape(s) {}
  int query_slots = lists ? 2 : 1; ///< blocks of queries
  int queries = 0;
  int keys = queries + query_slots * block_q * head_dim;
  int keys_bytes = group_kv * head_dim;
  int values = keys + stages * keys_bytes;
  int values_bytes = head_dim * group_kv;
  int key_scales = values + stages * values_bytes;
  int units = key_scales + stages * KEY_SCALES_BYTES; ///< of channels
  int unit_bytes = block_scales ? 0 : CHANNEL_VECTORS * head_dim * 4;
  int unit_slots =
      block_scales ? 1 : slots_of_units(stages, lists ? 1 : channel_tokens_kv / group_kv);
  int ratios = units + unit_slots * unit_bytes; ///< of units, for each warp
  int magics = ratios + (block_scales ? 0 : block_q / 16 * head_dim * 4);
  int barriers = magics + MAGIC_PRODUCT_BYTES;
  int queries_came = barriers + ring_bytes(stages); ///< with lists a ring's barriers
  int notes = queries_came + (lists ? ring_bytes(query_slots) : BARRIER_BYTES); ///< of stages
  int note_bytes = 4;                                                           ///< TileNote's
  int total = notes + (lists ? stages * note_bytes : 0);
};
