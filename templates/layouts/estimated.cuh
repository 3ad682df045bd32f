//===- layouts/estimated.cuh - Shared memory of the estimate's kernels ------===//
#pragma once

constexpr int kPooledTile =
    64; ///< means of blocks of keys, or queries, that a loop takes at a time

/// A tile of what the block owns, 16 bits a channel, then two stages for the tiles that it goes
/// over, then vectors.
struct EstimatedLayout {
  int head_dim, tokens;
  constexpr EstimatedLayout(int head_dim, int tokens) : head_dim(head_dim), tokens(tokens) {}

  int own = 0;
  int stage_bytes = kPooledTile * head_dim * 2;
  int stages = tokens * head_dim * 2;
  int vectors = stages + 2 * stage_bytes;
  int vectors_bytes = 1536; ///< a float a channel, a row of both stages, and a token; or two a row
  int total = vectors + vectors_bytes;
};
