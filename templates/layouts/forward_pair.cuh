//===- layouts/forward_pair.cuh - Shared memory of kernels/forward_pair.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

/// Keys and values come in units of 64: a group, which is one warpgroup's half of a step.
struct ForwardPairLayout : BlockShape {
  constexpr explicit ForwardPairLayout(const BlockShape& s) : BlockShape(s) {}
  static constexpr int VALUE_STAGES = 3;
  int unit_bytes = TOKENS_PER_TILE * head_dim;
  int queries = 0;
  int keys = queries + block_q * head_dim;
  int values = keys + 2 * stages * unit_bytes;
  int p = values + VALUE_STAGES * unit_bytes; ///< of both halves, in 8 bits
  int half_p_bytes = 2 * FRAGMENT_BYTES;
  int maxima = p + 2 * half_p_bytes; ///< of a query over either half, and later sums
  int key_barriers = maxima + 2 * block_q * 4;
  int value_barriers = key_barriers + 2 * ring_bytes(stages);
  int queries_came = value_barriers + ring_bytes(VALUE_STAGES);
  int total = queries_came + BARRIER_BYTES;
};
