//===- tile/prepass/token_share.cuh - Tokens, each shared by four lanes -------------===//
//
// How the pre-passes read a tensor by tokens: a warp takes 8 tokens at a time, those that share a
// scale of K (KEYS_A_SCALE in base.cuh), and 4 lanes a token. Each load brings 64 bytes of a token,
// the sums along channels need two exchanges between lanes, and a thread's channels are the same
// for every token, so that maxima of channels stay in its registers. Of tokens with more than 256
// channels 4 lanes have each half, and two warps take the 8 tokens.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/channels.cuh"

constexpr int LANES_A_UNIT = 4; ///< of 256 channels, or of all
constexpr int LANES_A_TOKEN = HEAD_DIM > 256 ? 2 * LANES_A_UNIT : LANES_A_UNIT;
constexpr int TOKENS_A_WARP = 32 / LANES_A_TOKEN;
constexpr int WARPS_A_SCALE = KEYS_A_SCALE / TOKENS_A_WARP;
constexpr int CHUNKS = HEAD_DIM / (8 * LANES_A_TOKEN); ///< of 8 channels, 16 bytes, in a thread
constexpr int SHARE = 8 * CHUNKS;                      ///< channels of a thread
constexpr int TOKENS_AT_ONCE = THREADS / LANES_A_TOKEN;

/// The channel of a thread's value i.
__device__ __forceinline__ int channel_of(int i) {
  const int of_unit = (i / 8 * LANES_A_UNIT + lane_id() % LANES_A_UNIT) * 8 + i % 8;
  return LANES_A_TOKEN == LANES_A_UNIT ? of_unit
                                       : lane_id() % LANES_A_TOKEN / LANES_A_UNIT * 256 + of_unit;
}
/// The token of this thread's lanes in a turn, counted from the scale block's first.
__device__ __forceinline__ int token_of_turn(int turn) {
  const int group = turn * (THREADS / 32 / WARPS_A_SCALE) + warp_id() / WARPS_A_SCALE;
  const int place = warp_id() % WARPS_A_SCALE * TOKENS_A_WARP + lane_id() / LANES_A_TOKEN;
  return group / 4 * 32 + group % 4 * 2 + place / 2 * 8 + place % 2;
}

/// Some consecutive tokens of one head in a tensor of the caller. Those outside begin .. end - 1
/// count as zeros, and so do channels behind the tensor's.
struct Source {
  const Element* first;
  s64 stride;
  int begin, end;
  int channels;

  __device__ __forceinline__ bool has(int token) const { return token >= begin && token < end; }
  __device__ __forceinline__ uint4 load(int token, int channel) const {
    return has(token) && is_channel(channel, channels)
               ? *reinterpret_cast<const uint4*>(first + token * stride + channel)
               : make_uint4(0, 0, 0, 0);
  }
};

__device__ __forceinline__ void unpack_octet(float* x, const uint4& words) {
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

/// A thread's part of a token, as it comes.
struct Share {
  uint4 chunks[CHUNKS];

  __device__ __forceinline__ void load(const Source& from, int token) {
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
      chunks[j] = from.load(token, channel_of(8 * j));
  }
  __device__ __forceinline__ void unpack_to(float (&x)[SHARE]) const {
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
      unpack_octet(&x[8 * j], chunks[j]);
  }
};

/// Maxima of a thread's channels over its tokens, where those are as they come: in 16 bits they
/// take half the registers.
struct ShareMaxima {
  u32 pairs[SHARE / 2] = {};

  __device__ __forceinline__ void take(const Share& share) {
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      const u32 words[4] = {share.chunks[j].x, share.chunks[j].y, share.chunks[j].z,
                            share.chunks[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[4 * j + i] = max_magnitudes<Element>(pairs[4 * j + i], words[i]);
    }
  }
  __device__ __forceinline__ void unpack_to(float (&largest)[SHARE]) const {
#pragma unroll
    for (int i = 0; i < SHARE / 2; ++i) {
      const float2 pair = unpack<Element>(pairs[i]);
      largest[2 * i] = pair.x;
      largest[2 * i + 1] = pair.y;
    }
  }
};

/// Calls visit(token, share) with each of this thread's tokens among the scale block's first
/// `tokens`, a multiple of TOKENS_AT_ONCE, while the next one's are on their way.
template <typename Visit>
__device__ __forceinline__ void walk_tokens(const Source& from, int tokens, const Visit& visit) {
  if constexpr (HEAD_DIM > 256) { // registers are short: THREADS are twice as many
#pragma unroll 1
    for (int turn = 0; turn * TOKENS_AT_ONCE < tokens; ++turn) {
      Share share;
      share.load(from, token_of_turn(turn));
      visit(token_of_turn(turn), share);
    }
    return;
  }
  Share next;
  next.load(from, token_of_turn(0));
#pragma unroll 1
  for (int turn = 0; turn * TOKENS_AT_ONCE < tokens; ++turn) {
    const Share share = next;
    next.load(from, token_of_turn(turn + 1)); // at the end: tokens that another block has, or none
    visit(token_of_turn(turn), share);
  }
}

/// Maximum and sum over the lanes of a token; every lane gets it.
__device__ __forceinline__ float token_max_nan(float x) {
  x = quad_max_nan(x);
  return LANES_A_TOKEN == 4 ? x : max_nan(x, __shfl_xor_sync(~0u, x, 4));
}
__device__ __forceinline__ float token_sum(float x) {
  x = quad_sum(x);
  return LANES_A_TOKEN == 4 ? x : x + __shfl_xor_sync(~0u, x, 4);
}
/// The token's product with a vector of channels in shared memory; every lane gets it.
__device__ __forceinline__ float dot(const Share& share, const float* vector) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    float x[8];
    unpack_octet(x, share.chunks[j]);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 y = *reinterpret_cast<const float4*>(vector + channel_of(8 * j + i));
      sum += x[i] * y.x;
      sum += x[i + 1] * y.y;
      sum += x[i + 2] * y.z;
      sum += x[i + 3] * y.w;
    }
  }
  return token_sum(sum);
}
/// This is for the thread's own values.
__device__ __forceinline__ float largest_magnitude(const float (&x)[SHARE]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    largest = max_magnitude(largest, x[i]);
  return largest;
}

struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return max_nan(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
/// Combines x[i] over the 8 lanes that differ in bits 2 to 4, always in the same order. A lane gets
/// COUNT / 8 of the results in x[0], .. of what was x[i], .. from i = first_combined<COUNT>() on.
/// From STRIDE 8 on it combines over 4 lanes, and a lane gets COUNT / 4.
template <int COUNT, int STRIDE = 4, typename Combine>
__device__ __forceinline__ void combine_lanes(float* x, const Combine& combine) {
  const bool upper = (lane_id() & STRIDE) != 0;
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    const float sent = upper ? x[i] : x[i + COUNT / 2];
    const float kept = upper ? x[i + COUNT / 2] : x[i];
    x[i] = combine(kept, __shfl_xor_sync(~0u, sent, STRIDE));
  }
  if constexpr (STRIDE < 16)
    combine_lanes<COUNT / 2, 2 * STRIDE>(x, combine);
}
template <int COUNT, int STRIDE = 4> __device__ __forceinline__ int first_combined() {
  const int lane = lane_id();
  if constexpr (STRIDE == 8)
    return (lane >> 3 & 1) * (COUNT / 2) + (lane >> 4 & 1) * (COUNT / 4);
  return (lane >> 2 & 1) * (COUNT / 2) + (lane >> 3 & 1) * (COUNT / 4) +
         (lane >> 4 & 1) * (COUNT / 8);
}
