//===- layouts/backward_dkv.cuh - Shared memory of kernels/backward_dkv.cuh -===//
#pragma once

#include "layouts/fused_dq.cuh"

struct BackwardDkvLayout : FusedDqLayout {
  bool dp16; ///< dP is summed in FP16
  constexpr BackwardDkvLayout(const BlockShape& s, bool with_dq, bool dp16)
      : FusedDqLayout(s, with_dq), dp16(dp16) {}

  int keys = 0;
  int values = keys + block_kv * score_row;
  int dq = values + block_kv * value_row; ///< FusedDqLayout
  int first_stage = dq + dq_bytes;
  // These are offsets from a stage's start:
  int queries = 0;
  int dout = queries + TOKENS_PER_TILE * score_row;
  /// With 0 stages what dK and dV take comes to the place of Q when S has been formed, and dO comes
  /// in halves of its channels, unless dV takes its rows.
  bool parts_take_turns = stages == 0;
  bool dv_takes_rows = dv16 && !dp16;
  int dout_parts = parts_take_turns && !dv_takes_rows ? 2 : 1;
  int rows_end = dout + TOKENS_PER_TILE * value_row / dout_parts;
  /// Q for dK: transposed, or rows of 16 bits.
  int dk_queries = parts_take_turns ? queries : rows_end;
  /// dO for dV, transposed; in 16 bits the rows for dP serve, or dp16, rows of the caller's dO.
  int dv_dout = dk_queries + TOKENS_PER_TILE * (dk16 ? sum_row : sum_channels);
  int dv_dout_row = dv_takes_rows ? 0 : dv16 ? sum_row : sum_channels;
  /// It takes the place of dO's rows, and so comes when dP has been formed.
  bool dv_dout_is_late =
      parts_take_turns && !dv_takes_rows && dv_dout + TOKENS_PER_TILE * dv_dout_row > dout;
  int rows =
      parts_take_turns ? rows_end : dv_dout + TOKENS_PER_TILE * dv_dout_row; ///< vectors per query
  int rows_bytes = (ROW_MINUS_DELTA + 1) * TOKENS_PER_TILE * 4;
  int stage_bytes = rows + ROW_VECTORS * TOKENS_PER_TILE * 4;
  // These are offsets in shared memory again:
  int channel_scales = first_stage + (stages == 2 ? 2 : 1) * stage_bytes;
  /// It holds the scales of three runs: those that sums had before, those that they have now, and
  /// the next.
  int scale_buffers = 3;
  int total = channel_scales + scale_buffers * dkv_channel_scales_bytes;
};
