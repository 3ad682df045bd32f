//===- tile/walk/list_bits.cuh - Lists of blocks, as bits -------------------------===//
//
// SPARSE_Q queries share a list of blocks of SPARSE_KV keys. A list is a row of words, whose bit b
// stands for block b. Rows of row_bits are lists of blocks of keys, one for each block of queries;
// the last bit of a row, behind the bits of all blocks, marks a list that names a block which does
// not exist. Where any score may be hidden, ROW_STEP is 2: each word of a row has another one
// behind it, whose bits say in which of its blocks some are (tile/walk/hidden_anywhere.cuh). Rows
// of column_bits are lists of blocks of queries, one for each query head and block of keys.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/copies.cuh"

constexpr int WORD_BITS = 32;

__device__ __forceinline__ int key_blocks(const Params& p) { return ceil_div(p.seq_kv, SPARSE_KV); }
__device__ __forceinline__ int query_blocks(const Params& p) { return ceil_div(p.seq_q, SPARSE_Q); }
/// The words of a row of row_bits, and of one of column_bits.
__device__ __forceinline__ int row_words(const Params& p) {
  return (key_blocks(p) / WORD_BITS + 1) * ROW_STEP;
}
__device__ __forceinline__ int column_words(const Params& p) {
  return ceil_div(query_blocks(p), WORD_BITS);
}
constexpr u32 INVALID = 1u << (WORD_BITS - 1); ///< in a list's last word

__device__ __forceinline__ int first_bit(u32 word) {
  return WORD_BITS - 1 - __clz(static_cast<int>(word & (0 - word)));
}

/// The first tile from `from` on, or else `end`, of the blocks of BLOCK tiles that a row lists.
template <int BLOCK, typename Word>
__device__ __forceinline__ int first_listed(const Word& word_of, int from, int end) {
  for (int block = from / BLOCK; block * BLOCK < end; block = (block / WORD_BITS + 1) * WORD_BITS) {
    if (const u32 word = word_of(block / WORD_BITS) >> block % WORD_BITS; word != 0)
      return minimum(end, maximum(from, (block + first_bit(word)) * BLOCK));
  }
  return end;
}
