//===- layouts/backward_dq.cuh - Shared memory of kernels/backward_dq.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

struct BackwardDqLayout : BlockShape {
  bool holds_rows; ///< registers hold the rows of Q and dO, and keys come to their place later
  constexpr BackwardDqLayout(const BlockShape& s, bool holds_rows)
      : BlockShape(s), holds_rows(holds_rows) {}

  /// Keys that share a scale of dS. In 16 bits there is none, and they are those of a tile.
  int group = dq16 ? TOKENS_PER_TILE : group_kv;
  int queries = 0;
  int dout = queries + block_q * score_row;
  int rows_end = dout + block_q * value_row;
  int keys = holds_rows ? 0 : rows_end;
  int keys_bytes = TOKENS_PER_TILE * score_row;
  int places = stages == 2 ? 2 : 1;
  int values = keys + places * keys_bytes;
  int values_bytes = TOKENS_PER_TILE * value_row;
  int values_end = values + places * values_bytes;
  /// Keys that dS meets. With 0 stages they come to the place of the group's last 8-bit keys when S
  /// has been formed.
  bool parts_take_turns = stages == 0;
  int summed = parts_take_turns ? keys : values_end;
  int summed_bytes = group * (dq16 ? sum_row : sum_channels);
  /// The keys that dS meets come a group at a time: with the group's only tile, or beside its
  /// first.
  bool prefetches_summed = stages == 2 && group == TOKENS_PER_TILE;
  int key_scales =
      parts_take_turns ? values_end : summed + (prefetches_summed ? 2 : 1) * summed_bytes;
  int maxima = key_scales + (qk16 ? 0 : places * KEY_SCALES_BYTES);
  int end = maxima + (block_scales && !dq16 ? 2 * block_q / 16 * 8 : 0);
  int total = end < rows_end ? rows_end : end;
};
