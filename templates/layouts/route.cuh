//===- layouts/route.cuh - Shared memory of kernels/route_blocks.cuh --------===//
#pragma once

#include "layouts/block_shape.cuh"

/// Scores of some blocks of queries with all blocks of keys, then a vector of channels of each
/// block of queries, and one that is subtracted from the keys.
struct RouteLayout {
  int most_blocks = 2048; ///< of keys, for which there is room
  int most_scores = 8 * most_blocks;
  int most_channels = 256;
  int row = most_channels + 4; ///< floats of a vector: two in a row lie in other banks
  int vectors = most_scores * 4;
  int reference = vectors + 16 * row * 4;
  int total = reference + most_channels * 4;

  /// How many blocks of queries a block takes: few for long rows, which need room.
  constexpr int rows(long long key_blocks) const { return key_blocks <= most_blocks / 2 ? 16 : 8; }
};
