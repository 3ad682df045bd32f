//===- layouts/fused_dq.cuh - Shared memory for dQ beside dK and dV -------===//
#pragma once

#include "layouts/block_shape.cuh"

/// From its own beginning: the keys, rows in 16 bits or transposed in 8; a tile's dS; and scales.
struct FusedDqLayout : BlockShape {
  bool with_dq; ///< else it has no bytes
  constexpr FusedDqLayout(const BlockShape& s, bool with_dq) : BlockShape(s), with_dq(with_dq) {}
  bool int8_dq = with_dq && !dq16;
  int dq_element_bytes = with_dq ? (dq16 ? 2 : 1) : 0;
  int ds = block_kv * head_dim * dq_element_bytes;
  int scales = ds + block_kv * TOKENS_PER_TILE * dq_element_bytes;
  // Of the scales, from their start: two sets of the queries' maxima in turn, each warp's copy of
  // the inverse scales, and the keys' scales of channels.
  int set_bytes = TOKENS_PER_TILE * 4;
  int inverses = 2 * set_bytes;
  int channels = inverses + block_kv / 16 * set_bytes;
  int scales_bytes = int8_dq ? (channels + head_dim * 4 + 1023) / 1024 * 1024 : 0;
  int dq_bytes = scales + scales_bytes;
};
