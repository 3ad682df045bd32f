//===- tile/walk/turned_bits.cuh - Squares of bits, turned over by a warp ---------===//
#pragma once

#include "base.cuh"

/// A square of bits, a word a lane, turned over: bit b of lane l becomes bit l of lane b.
__device__ __forceinline__ u32 turn_over(u32 word) {
  u32 low = 0x0000ffffu; // those bits whose place is without bit `by`
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    const u32 other = __shfl_xor_sync(~0u, word, by);
    word = (lane_id() & by) == 0 ? (word & low) | (other & low) << by
                                 : (word & ~low) | (other >> by & low);
    low ^= low << by / 2;
  }
  return word;
}
