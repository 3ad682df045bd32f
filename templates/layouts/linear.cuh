//===- layouts/linear.cuh - Shared memory of the linear branch's kernels ---===//
#pragma once

#include "layouts/block_shape.cuh"

/// A block of kernels/linear_sums.cuh that sums vectors has those of so many results.
constexpr int kSummedNorms = 16;

/// The other blocks have tiles of `rows` results by so many columns: a matrix of channels by
/// channels is a row here. They take a run of tiles, which follow one another along the columns,
/// and stages of `at_once` of the blocks that are summed. With wgmma there are barriers behind the
/// stages. Blocks that sum vectors store those of half of their warps in the place of stages.
struct SumsLayout {
  bool wgmma;
  int columns = 128;
  int rows = wgmma ? 256 : 128;
  int at_once = wgmma ? 64 : 32; ///< in words of 32 bits of lists
  int stages = wgmma ? 8 : 4;
  int longest_run = wgmma ? 4 : 1;
  int tiles; ///< along the columns
  int stage_bytes = at_once * columns * 2;
  int barriers = stages * stage_bytes;
  int total = barriers + (wgmma ? ring_bytes(stages) : 0);
  constexpr SumsLayout(int head_dim, bool wgmma)
      : wgmma(wgmma), tiles(head_dim * head_dim / columns) {}

  /// How many blocks have the matrices of a tile of results, of which there are so many in all. A
  /// long run begins seldom, which takes a fourth of a tile's time, and shares out less evenly.
  constexpr int runs(long long tiles_of_results) const {
    constexpr int kBlocksAtOnce = 132; // one on each multiprocessor of an H100 or H200
    int best = 1;
    long long shortest = 0;
    for (int run = 1; run <= longest_run; run *= 2) {
      const long long blocks = tiles_of_results * (tiles / run);
      const long long time = (blocks + kBlocksAtOnce - 1) / kBlocksAtOnce * (4 * run + 1);
      if (run == 1 || time < shortest)
        best = run, shortest = time;
    }
    return tiles / best;
  }
};

/// Tiles of a block's tokens, 16 bits a channel, then a matrix of channels by channels, then
/// vectors.
struct LinearLayout {
  int head_dim, tokens, row_tiles;
  bool has_matrix;
  constexpr LinearLayout(int head_dim, int tokens, int row_tiles, bool has_matrix)
      : head_dim(head_dim), tokens(tokens), row_tiles(row_tiles), has_matrix(has_matrix) {}

  int tile_bytes = tokens * head_dim * 2;
  int matrix_bytes = head_dim * head_dim * 2;
  int first = 0, second = tile_bytes;
  int matrix = has_matrix ? row_tiles * tile_bytes : 0; ///< or in the place of the tiles
  int vectors = row_tiles * tile_bytes + (has_matrix ? matrix_bytes : 0);
  int vectors_bytes = 2048; ///< two floats for each of 256 threads, or four a token of 128
  int total = vectors + vectors_bytes;
};
