//===- layouts/backward_ws.cuh - Shared memory of kernels/backward_ws.cuh -===//
#pragma once

#include "layouts/block_shape.cuh"

struct BackwardWsLayout : BlockShape {
  bool dq_sum16;
  constexpr BackwardWsLayout(const BlockShape& s, bool dq_sum16)
      : BlockShape(s), dq_sum16(dq_sum16) {}

  int keys = 0; ///< in 8 bits, for S
  int values = keys + block_kv * score_row;
  int key_rows = values + block_kv * value_row; ///< in 16, for dQ
  int kept_bytes = key_rows + block_kv * value_row;
  int ds = kept_bytes; ///< two buffers
  int ds_bytes = block_kv * TOKENS_PER_TILE * 2;
  int dq = ds + 2 * ds_bytes; ///< a part a warp, on its way to memory: half of the channels
  int warp_dq_bytes = 16 * (head_dim / 2) * (dq_sum16 ? 2 : 4);
  int first_stage = dq + block_kv / 16 * warp_dq_bytes;
  // These are offsets from a stage's start:
  int queries = 0; ///< in 8 bits
  int dout = queries + TOKENS_PER_TILE * score_row;
  int rows = dout + TOKENS_PER_TILE * value_row; ///< vectors per query
  int rows_bytes = (ROW_MINUS_DELTA + 1) * TOKENS_PER_TILE * 4;
  // In the place of the last vector, which nobody reads here. Which tile it is (StageTile): its
  // number in its head comes with what S reads, that among all with what dK reads. Factors of the
  // queries' sums of dQ in FP16 come with what dK reads.
  int tile = rows + rows_bytes;
  int factors = tile + 16;
  int factors_bytes = dq_sum16 ? TOKENS_PER_TILE * 2 : 0;
  int query_rows = rows + ROW_VECTORS * TOKENS_PER_TILE * 4; ///< in 16 bits, for dK
  int query_rows_bytes = TOKENS_PER_TILE * value_row;
  int stage_bytes = query_rows + query_rows_bytes;
  // These are offsets in shared memory again. There are the barriers of the ring of what S, dP and
  // dV read, then of that of what dK reads; that of the keys; and where both warpgroups meet, each
  // thread in code of its own, as synccheck wants no named one.
  int barriers = first_stage + stages * stage_bytes;
  int kept_came = barriers + 2 * ring_bytes(stages);
  int ds_written = kept_came + BARRIER_BYTES;
  int total = ds_written + BARRIER_BYTES;
};
