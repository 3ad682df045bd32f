//===- layouts/backward_dkv_pair.cuh - Shared memory of kernels/backward_dkv_pair.cuh -===//
#pragma once

#include "layouts/query_pairs.cuh"

struct BackwardDkvPairLayout : QueryPairsLayout {
  using QueryPairsLayout::QueryPairsLayout;
  int pieces = 3; ///< places of transposed tiles
  int first_piece = tiles_end;
  int piece_bytes = TOKENS_PER_TILE * head_dim;
  int handed = first_piece + pieces * piece_bytes; ///< KeptScores of each warpgroup
  int channel_scales = handed + 2 * KEPT_SCORES_BYTES;
  int scale_buffers = 2; ///< runs whose scales are there: those of sums, and the next
  int tile_barriers = channel_scales + 2 * scale_buffers * dkv_channel_scales_bytes;
  int piece_barriers = tile_barriers + 2 * ring_bytes(1);
  int ready = piece_barriers + ring_bytes(pieces);
  int taken = ready + 2 * BARRIER_BYTES;
  int keys_came = taken + 2 * BARRIER_BYTES;
  int total = keys_came + BARRIER_BYTES;
};
