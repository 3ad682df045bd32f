//===- layouts/backward_dkv_ws.cuh - Shared memory of kernels/backward_dkv_ws.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

struct BackwardDkvWsLayout : BlockShape {
  constexpr explicit BackwardDkvWsLayout(const BlockShape& s) : BlockShape(s) {}
  int keys = 0;
  int values = keys + block_kv * head_dim;
  int first_stage = values + block_kv * value_row;
  // These are offsets from a stage's start:
  int queries = 0;
  int dout = queries + TOKENS_PER_TILE * head_dim;
  /// Q for dK: transposed, or rows of 16 bits.
  int dk_queries = dout + TOKENS_PER_TILE * value_row;
  /// dO for dV, transposed; in 16 bits the rows for dP serve.
  int dv_dout = dk_queries + TOKENS_PER_TILE * (dk16 ? value_row : head_dim);
  int rows = dv_dout + TOKENS_PER_TILE * (dv16 ? 0 : head_dim); ///< vectors per query
  int rows_bytes = ROW_VECTORS * TOKENS_PER_TILE * 4;
  int starts = rows + rows_bytes; ///< of dP, from a vector of the rows
  int stage_bytes = starts + COLUMN_START_BYTES;
  // These are offsets in shared memory again:
  int ones = first_stage + stages * stage_bytes;
  int channel_scales = ones + ONES_ROWS_BYTES;
  /// It holds the scales of as many runs: one for each stage, as a run may be one tile, and one for
  /// the tile before them, whose scales sums leave when its stage is free already.
  int scale_buffers = stages + 1;
  int ratios =
      channel_scales + scale_buffers * dkv_channel_scales_bytes; ///< of scales, for each warp
  int barriers = ratios + (dkv_has_channel_scales ? block_kv / 16 * vector_bytes : 0);
  int started = barriers + ring_bytes(stages); ///< a barrier a stage
  int keys_came = started + stages * BARRIER_BYTES;
  int messages = keys_came + BARRIER_BYTES; ///< of stages
  int message_bytes = 4;                    ///< TileMessage's
  int total = messages + (lists ? stages * message_bytes : 0);
};
