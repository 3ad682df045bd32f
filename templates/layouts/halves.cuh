//===- layouts/halves.cuh - Shared memory of gradients of very wide heads, sm_90a -===//
#pragma once

#include "layouts/block_shape.cuh"

/// That of kernels/backward_dq_halves.cuh and kernels/backward_dkv_halves.cuh. A block owns 64
/// tokens. What S and dP take of the other side's tokens comes in panels of 64 tokens and 128
/// bytes, in a ring of each warpgroup's; what gradients take of them in units of 64.
struct HalvesLayout : BlockShape {
  constexpr explicit HalvesLayout(const BlockShape& s) : BlockShape(s) {}
  static constexpr int PANEL_STAGES = 3, PANEL = TOKENS_PER_TILE * 128;
  bool in_16_bits = dk16;                                   ///< and so are dV and dQ
  int own_scores = 0;                                       ///< rows for S
  int own_values = own_scores + TOKENS_PER_TILE * head_dim; ///< rows for dP
  int panels = own_values + TOKENS_PER_TILE * value_row;
  int half_panels_bytes = PANEL_STAGES * PANEL;
  int units = panels + 2 * half_panels_bytes;
  int unit_stages = in_16_bits ? 1 : 2;
  int unit_bytes = TOKENS_PER_TILE * (in_16_bits ? value_row : head_dim);
  int handed = units + unit_stages * unit_bytes;
  int fragments = TOKENS_PER_TILE / (in_16_bits ? 16 : 32); ///< of P or dS of one half
  int half_handed_bytes = fragments * FRAGMENT_BYTES;
  int scales = handed + 2 * half_handed_bytes;        ///< of a thread's rows, for each half
  int rows = scales + (in_16_bits ? 0 : 2 * 128 * 8); ///< of dK and dV: vectors per query, as well
  int rows_bytes = ROW_VECTORS * TOKENS_PER_TILE * 4;
  int panel_barriers = rows + 2 * rows_bytes;
  int unit_barriers = panel_barriers + 2 * ring_bytes(PANEL_STAGES);
  int own_came = unit_barriers + ring_bytes(unit_stages);
  int total = own_came + BARRIER_BYTES;
};
