//===- layouts/query_pairs.cuh - What both dK/dV kernels of pairs have in common -===//
#pragma once

#include "layouts/block_shape.cuh"

struct QueryPairsLayout : BlockShape {
  constexpr explicit QueryPairsLayout(const BlockShape& s) : BlockShape(s) {}
  // These are offsets from the start of a warpgroup's tile of queries:
  int tile_queries = 0;
  int tile_dout = tile_queries + TOKENS_PER_TILE * head_dim;
  int tile_rows = tile_dout + TOKENS_PER_TILE * value_row; ///< vectors per query
  int tile_rows_bytes = ROW_VECTORS * TOKENS_PER_TILE * 4;
  int tile_bytes = tile_rows + tile_rows_bytes;
  // These are offsets in shared memory:
  int keys = 0;
  int values = keys + block_kv * head_dim;
  int tiles = values + block_kv * value_row;
  int tiles_end = tiles + 2 * tile_bytes;
};
