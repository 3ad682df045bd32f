//===- tile/sla/summed_blocks.cuh - What is summed over the blocks that lists leave out ---===//
//
// Sums of matrices are a product: a row of zeros and ones for each result, by the blocks' matrices,
// each of which is a row of channels by channels. The rows of zeros and ones are made from bits in
// registers; instead of a one there is a 2, whose bf16 is a single byte that is not 0, and sums are
// halved at the end, which is exact.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/linear.cuh"
#include "tile/sla/channel_matrix.cuh"
#include "tile/walk/list_bits.cuh"

/// What is summed and where sums go, of one head of keys.
struct BlockSums {
  const bf16* matrices;
  const float* norms;
  bf16* sums;
  float* norm_sums;
  int heads, count; ///< of blocks that are summed: they lie head by head
  int results;
  int most_results; ///< those that the grid has blocks for

  /// A step takes so many words' blocks of a head; the last of a head may have fewer.
  template <int WORDS> __device__ __forceinline__ int steps() const {
    return heads * ceil_div(count, WORDS * WORD_BITS);
  }
};

/// The blocks of a step.
template <int WORDS> struct SummedBlocks {
  int head = 0, first = 0;
  const int count; ///< of a head

  __device__ __forceinline__ explicit SummedBlocks(const BlockSums& of) : count(of.count) {}
  __device__ __forceinline__ void next() {
    first += WORDS * WORD_BITS;
    if (first >= count)
      first = 0, ++head;
  }
  __device__ __forceinline__ s64 place() const { return static_cast<s64>(head) * count + first; }
};

/// Operand A of a row's 32 blocks, a 2 where one is left out, in two steps of 16. Place 2 t + e of
/// half h of step s stands for block 16 h + 8 e + 2 t + s: so the blocks of a register are the same
/// bit of neighbouring bytes.
struct Ones {
  u32 twos[2]; ///< the high byte of a 2 for each byte of the word and each step

  __device__ __forceinline__ explicit Ones(u32 listed) {
    const u32 left_out = ~(listed << (6 - lane_id() % 4 * 2));
    twos[0] = left_out & 0x40404040u;
    twos[1] = left_out >> 1 & 0x40404040u;
  }
  __device__ __forceinline__ u32 low(int step) const { return __byte_perm(twos[step], 0, 0x1404); }
  __device__ __forceinline__ u32 high(int step) const { return __byte_perm(twos[step], 0, 0x3424); }
  /// The block at a place of a half, in step 0; in step 1 it is the next one.
  static __device__ __forceinline__ int block_at(int half, int place) {
    return half * 16 + place % 2 * 8 + place / 2 * 2;
  }
  /// The other way round: where a block is among the places of both steps.
  static __device__ __forceinline__ int place_of(int block) {
    return block % 2 * 16 + block / 16 * 8 + block % 8 / 2 * 2 + block / 8 % 2;
  }
};
