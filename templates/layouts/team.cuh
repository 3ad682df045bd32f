//===- layouts/team.cuh - Shared memory of the kernels of the family team -===//
//
// Chunks of tiles of the other side come through a ring of slots. A chunk is 64 rows of 128 bytes,
// a panel (tile/memory/swizzle.cuh), or 128 channels of 64 tokens in 8 bits, and fills a slot. The
// block's own rows lie in panels as well, of as many rows as the block owns.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/block_shape.cuh"

struct TeamLayout : BlockShape {
  constexpr explicit TeamLayout(const BlockShape& s) : BlockShape(s) {}
  static constexpr int SLOTS = 4;
  static constexpr int SLOT_BYTES = TOKENS_PER_TILE * 128;
  static constexpr int WARPS = 8;
  /// A fragment of operand A, which a warp's lanes write and read as they have it.
  static constexpr int FRAGMENT = 32 * 16;
};

struct TeamForwardLayout : TeamLayout {
  constexpr explicit TeamForwardLayout(const BlockShape& s) : TeamLayout(s) {}
  int queries = 0;
  int ring = queries + block_q * head_dim;
  int p = ring + SLOTS * SLOT_BYTES;            ///< in 8 bits
  int maxima = p + block_q / 16 * 2 * FRAGMENT; ///< of a query over either half of the keys
  int factors = maxima + 2 * block_q * 4;       ///< of a query's O, and of its products
  int total = factors + 2 * block_q * 4;
};

struct TeamDqLayout : TeamLayout {
  constexpr explicit TeamDqLayout(const BlockShape& s) : TeamLayout(s) {}
  int queries = 0;
  int dout = queries + block_q * head_dim;
  int ring = dout + block_q * value_row;
  int ds = ring + SLOTS * SLOT_BYTES;
  int maxima = ds + block_q / 16 * (dq16 ? 4 : 2) * FRAGMENT; ///< over each quarter of the keys
  int total = maxima + 4 * block_q * 4;
};

struct TeamDkvLayout : TeamLayout {
  constexpr explicit TeamDkvLayout(const BlockShape& s) : TeamLayout(s) {}
  int keys = 0;
  int values = keys + block_kv * head_dim;
  int ring = values + block_kv * value_row;
  int p = ring + SLOTS * SLOT_BYTES;
  int ds = p + block_kv / 16 * (dv16 ? 4 : 2) * FRAGMENT;
  int maxima = ds + block_kv / 16 * (dk16 ? 4 : 2) * FRAGMENT; ///< of P, then of dS
  int rows = maxima + 2 * 4 * block_kv * 4; ///< vectors per query, of this tile and of the next
  int rows_bytes = ROW_VECTORS * TOKENS_PER_TILE * 4;
  int total = rows + 2 * rows_bytes;
};
