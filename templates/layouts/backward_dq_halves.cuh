//===- layouts/backward_dq_halves.cuh - Shared memory of kernels/backward_dq_halves.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

/// Keys and values come in panels of 64 tokens and 128 bytes, in a ring of each warpgroup's; keys
/// that dS meets in units of 64.
struct BackwardDqHalvesLayout : BlockShape {
  constexpr explicit BackwardDqHalvesLayout(const BlockShape& s) : BlockShape(s) {}
  static constexpr int PANEL_STAGES = 3, PANEL = TOKENS_PER_TILE * 128;
  int queries = 0;
  int dout = queries + block_q * head_dim;
  int panels = dout + block_q * value_row;
  int half_panels_bytes = PANEL_STAGES * PANEL;
  int summed = panels + 2 * half_panels_bytes;
  int summed_stages = dq16 ? 1 : 2;
  int unit_bytes = TOKENS_PER_TILE * (dq16 ? value_row : head_dim);
  int score_gradients = summed + summed_stages * unit_bytes;
  int fragments = TOKENS_PER_TILE / (dq16 ? 16 : 32); ///< of dS of one half
  int half_gradients_bytes = fragments * FRAGMENT_BYTES;
  int scales = score_gradients + 2 * half_gradients_bytes; ///< of a thread's rows, for each half
  int panel_barriers = scales + (dq16 ? 0 : 2 * 128 * 8);
  int summed_barriers = panel_barriers + 2 * ring_bytes(PANEL_STAGES);
  int rows_came = summed_barriers + ring_bytes(summed_stages);
  int total = rows_came + BARRIER_BYTES;
};
