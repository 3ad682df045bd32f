//===- layouts/backward_fused.cuh - Shared memory of kernels/backward_fused.cuh -===//
//
// At 128 channels it takes less than 99 KB, what a block has on sm_86, sm_89 and sm_120.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/block_shape.cuh"

struct BackwardFusedLayout : BlockShape {
  constexpr explicit BackwardFusedLayout(const BlockShape& s) : BlockShape(s) {}
  int values = 0;
  int dq_keys = values + block_kv * value_row; ///< transposed, for dQ
  int queries = dq_keys + block_kv * head_dim;
  int dout = queries + TOKENS_PER_TILE * score_row;
  int dout_parts = 1;
  bool dv_dout_is_late = false;
  int dk_queries = dout + TOKENS_PER_TILE * value_row;   ///< transposed, for dK
  int dv_dout = dk_queries + TOKENS_PER_TILE * head_dim; ///< transposed, for dV
  int ds = dv_dout;                                      ///< when dV has been formed: for dQ
  int ds_bytes = block_kv * TOKENS_PER_TILE;
  int transposed_bytes = TOKENS_PER_TILE * head_dim;
  int after_ds = ds + (ds_bytes > transposed_bytes ? ds_bytes : transposed_bytes);
  /// Keys for S. 8-bit keys lie, until the warps have them in registers, where the first transposed
  /// tiles come then; if these have less room, behind them.
  int keys_bytes = block_kv * score_row;
  bool keys_leave = !qk16 && after_ds - dk_queries >= keys_bytes;
  int keys = keys_leave ? dk_queries : after_ds;
  int rows = keys_leave ? after_ds : keys + keys_bytes; ///< vectors per query
  int rows_bytes = (ROW_MINUS_DELTA + 1) * TOKENS_PER_TILE * 4;
  int channel_scales = rows + ROW_VECTORS * TOKENS_PER_TILE * 4;
  /// It holds the scales of three runs: those that sums had before, those that they have now, and
  /// the next.
  int scale_buffers = 3;
  // For dQ's dS there are two sets of the queries' maxima in turn, each warp's copy of the inverse
  // scales, and the keys' scales of channels.
  int maxima = channel_scales + scale_buffers * dkv_channel_scales_bytes;
  int set_bytes = TOKENS_PER_TILE * 4;
  int inverses = maxima + 2 * set_bytes;
  int channels = inverses + block_kv / 16 * set_bytes;
  /// The block's ticket and its last turn (tile/dq/dq_order.cuh).
  int order = channels + head_dim * 4;
  int total = order + 16;
};
