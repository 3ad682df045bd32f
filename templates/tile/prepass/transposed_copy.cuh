//===- tile/prepass/transposed_copy.cuh - Writing 8-bit copies for sums over tokens ---===//
//
// A copy lies in tiles (tile/memory/swizzle.cuh) of channels x 64 tokens, slots in the order sigma
// (tile/memory/permutation.cuh). A warp takes 32 tokens x 32 channels at a time: a lane the 4
// tokens of a quad and 8 channels, whose bytes form a word for each channel. Four lanes exchange
// words until each has 16 bytes of two channels, and the warp stores 32 bytes of each: no shared
// memory, and no waiting for other warps.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/memory/permutation.cuh"
#include "tile/memory/swizzle.cuh"
#include "tile/prepass/token_share.cuh"

constexpr int BLOCK_TOKENS = 32;            ///< of a warp at a time
constexpr int WARPS_ACROSS = HEAD_DIM / 32; ///< that take the same tokens
constexpr int WARPS_ALONG = THREADS / 32 / WARPS_ACROSS;

/// A lane's place among 32 tokens x HEAD_DIM channels.
struct QuadPlace {
  int quad = lane_id() >> 2;
  int channel = (warp_id() % WARPS_ACROSS * 4 + lane_id() % 4) * 8; ///< the first of 8
};

/// Each of the lanes whose quads differ in the lowest two bits gets the words of all four, in
/// order, for its channels 2 (quad % 4) and the next one.
__device__ __forceinline__ void gather_quads(uint4 (&vectors)[2], const u32 (&words)[8], int quad) {
  const bool upper = (quad & 2) != 0, odd = (quad & 1) != 0;
  u32 half[2][4]; // of quads without and with bit 1; channels 4 (bit 1 of the own) + 0, .., 3
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 kept = upper ? words[4 + i] : words[i];
    const u32 got = __shfl_xor_sync(~0u, upper ? words[i] : words[4 + i], 8);
    half[0][i] = upper ? got : kept;
    half[1][i] = upper ? kept : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 of_quad[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const u32 kept = odd ? half[k][2 + i] : half[k][i];
      const u32 got = __shfl_xor_sync(~0u, odd ? half[k][i] : half[k][2 + i], 4);
      of_quad[2 * k] = odd ? got : kept;
      of_quad[2 * k + 1] = odd ? kept : got;
    }
    vectors[i] = make_uint4(of_quad[0], of_quad[1], of_quad[2], of_quad[3]);
  }
}

/// Walks over the scale block's first `tokens`, a multiple of 32, calling prepare(x, token, slot)
/// with 4 tokens of 8 channels, the token of the first and its slot, which the other three's
/// follow; what it leaves in x is written where WRITE, times the channels' inverses.
template <bool WRITE, typename Prepare>
__device__ __forceinline__ void walk_quads(const Source& from, int tokens, const float* inverses,
                                           s8* copy, const Prepare& prepare) {
  const QuadPlace at;
  float inverse[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
    inverse[c] = WRITE ? inverses[at.channel + c] : 0;
  uint4 next[4];
  const auto load = [&](int block) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      next[i] = from.load(block * BLOCK_TOKENS + token_of_quad(at.quad, i), at.channel);
  };
  const int first = warp_id() / WARPS_ACROSS;
#pragma unroll 1
  for (int block = first; block * BLOCK_TOKENS < tokens; block += WARPS_ALONG) {
    load(block);
    float x[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      unpack_octet(x[i], next[i]);
    prepare(x, block * BLOCK_TOKENS + first_token_of_quad(at.quad),
            block * BLOCK_TOKENS + 4 * at.quad);
    if constexpr (WRITE) {
      u32 words[8];
#pragma unroll
      for (int c = 0; c < 8; ++c)
        words[c] = pack_s8(x[0][c] * inverse[c], x[1][c] * inverse[c], x[2][c] * inverse[c],
                           x[3][c] * inverse[c]);
      uint4 vectors[2];
      gather_quads(vectors, words, at.quad);
      s8* tile = copy + block / 2 * (HEAD_DIM * TOKENS_PER_TILE);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = at.channel + at.quad % 4 * 2 + i;
        *reinterpret_cast<uint4*>(tile + chunk_offset<TOKENS_PER_TILE>(
                                             channel, block % 2 * 2 + at.quad / 4)) = vectors[i];
      }
    }
  }
}
