//===- layouts/fused_dq.cuh - Shared memory for dQ beside dK and dV -------===//
#pragma once

#include "layouts/block_shape.cuh"

/// From its own beginning: the keys' rows in 16 bits, and a tile's dS.
struct FusedDqLayout : BlockShape {
  bool with_dq; ///< else it has no bytes
  constexpr FusedDqLayout(const BlockShape& s, bool with_dq) : BlockShape(s), with_dq(with_dq) {}
  int dq_element_bytes = with_dq ? 2 : 0;
  int ds = block_kv * head_dim * dq_element_bytes;
  int dq_bytes = ds + block_kv * TOKENS_PER_TILE * dq_element_bytes;
};
