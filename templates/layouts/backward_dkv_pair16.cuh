//===- layouts/backward_dkv_pair16.cuh - Shared memory of kernels/backward_dkv_pair16.cuh -===//
#pragma once

#include "layouts/query_pairs.cuh"

struct BackwardDkvPair16Layout : QueryPairsLayout {
  using QueryPairsLayout::QueryPairsLayout;
  int queries = tiles_end; ///< of 16 bits, for dK
  int queries_bytes = TOKENS_PER_TILE * value_row;
  int handed = queries + 2 * queries_bytes; ///< P or dS of each warpgroup
  int handed_bytes = block_kv * TOKENS_PER_TILE * 2;
  int tile_barriers = handed + 2 * handed_bytes;
  int query_barriers = tile_barriers + 2 * ring_bytes(1);
  int ready = query_barriers + 2 * ring_bytes(1);
  int taken = ready + 2 * BARRIER_BYTES;
  int keys_came = taken + 2 * BARRIER_BYTES;
  int total = keys_came + BARRIER_BYTES;
};
