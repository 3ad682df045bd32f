//===- layouts/linear.cuh - Shared memory of the linear branch's kernels ---===//
#pragma once

// A block of kernels/linear_sums.cuh has so many results, and so many columns of them: a matrix of
// channels by channels is a row here. Or it has the vectors of kSummedNorms results.
constexpr int kSummedRows = 128;
constexpr int kSummedColumns = 128;
constexpr int kSummedNorms = 16;
constexpr int kSummedAtOnce = 32; ///< blocks of a list: a word of bits

/// Stages of rows of columns. Or the vectors of half of a block's warps.
struct SumsLayout {
  int stages = 4;
  int stage_bytes = kSummedAtOnce * kSummedColumns * 2;
  int total = stages * stage_bytes;
  /// The blocks that share a tile of results out: first those of vectors.
  int norm_parts = kSummedRows / kSummedNorms, parts;
  constexpr explicit SumsLayout(int head_dim)
      : parts(norm_parts + head_dim * head_dim / kSummedColumns) {}
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
