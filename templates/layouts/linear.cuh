//===- layouts/linear.cuh - Shared memory of the linear branch's kernels ---===//
#pragma once

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
