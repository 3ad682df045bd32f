//===- tile/prepass/scale_block.cuh - What the threads of a quantising block share ---------===//
//
// They share the tokens of one scale block of one head: shared memory, and what the block finds out
// together.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "tile/dq/dq_factor.cuh"
#include "tile/memory/swizzle.cuh"
#include "tile/prepass/channel_scale.cuh"
#include "tile/prepass/half_operands.cuh"
#include "tile/prepass/key_mean.cuh"
#include "tile/prepass/rotation.cuh"
#include "tile/prepass/transposed_copy.cuh"
#include "tile/prepass/value_sums.cuh"
#include "tile/walk/place.cuh"

/// So many warps hand each other vectors at a time: those of wide heads take turns.
constexpr int HANDING_WARPS = HEAD_DIM > 256 ? WARPS / 2 : WARPS;

struct Shared {
  float mean[HEAD_DIM];
  float first_key[HEAD_DIM]; ///< as the scores have it
  float first_value[HEAD_DIM];
  float inverse[HEAD_DIM], inverse_dout[HEAD_DIM];   ///< of channels of the copies over tokens
  float of_warp[HANDING_WARPS * HEAD_DIM];           ///< what warps hand each other
  float rows[QUERY_TOKENS * ROW_VECTORS];            ///< as q_rows has them
  float first_p[QUERY_TOKENS], factor[QUERY_TOKENS]; ///< P of key 0, and 2^-e, by slot
  float query_mean[SMOOTH_Q ? HEAD_DIM : 1]; ///< what is subtracted from the scale block's queries
};
__shared__ Shared shared;
// Each of the block's first HEAD_DIM threads takes one channel of its results, here and in what
// includes this file.
static_assert(THREADS % HEAD_DIM == 0, "a channel without a thread would be left out");

__device__ __forceinline__ float& row_value(int vector, int slot) {
  return shared.rows[(slot / TOKENS_PER_TILE * ROW_VECTORS + vector) * TOKENS_PER_TILE +
                     slot % TOKENS_PER_TILE];
}
__device__ __forceinline__ float4 four_of(const float* floats) {
  return *reinterpret_cast<const float4*>(floats);
}

/// Enters a scale block of queries or keys. Where sequences are packed, its place among those of
/// all becomes its number in its sequence; false where that has no such scale block.
template <int TOKENS, bool OF_QUERIES>
__device__ __forceinline__ bool enter_scale_block(const Params& p, int& block) {
  if constexpr (PACKED) {
    const bool has = enter_sequence<TOKENS, OF_QUERIES>(p, block);
    block = packed_place().block;
    return has;
  }
  return true;
}

/// The tokens of a scale block: those that the head has, and those that its copies have.
struct ScaleBlock {
  int first, valid, written;
};
template <int TOKENS>
__device__ __forceinline__ ScaleBlock scale_block_of(int block, int tokens, int padded) {
  const int first = block * TOKENS;
  return {first, minimum(TOKENS, tokens - first), minimum(TOKENS, padded - first)};
}

//===--- What a whole block finds out --------------------------------------===//

/// The largest over the block; every thread gets it.
__device__ __forceinline__ float block_max(float x) {
  x = warp_max_nan(x);
  __syncthreads();
  if (lane_id() == 0)
    shared.of_warp[warp_id()] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp)
    x = max_nan(x, shared.of_warp[warp]);
  __syncthreads();
  return x;
}

/// Whether maxima of channels are found in a walk of their own, as registers do not hold them
/// beside a token.
constexpr bool MAXIMA_APART = HEAD_DIM > 256;

/// The largest magnitude of a head's sample in every thread; 1 where it has none. Called where a
/// channel of a scale block is zeros or very small, and not inlined, so that it takes no registers
/// elsewhere.
__device__ __noinline__ float magnitude_of(Source sample) {
  if constexpr (MAXIMA_APART) {
    float most = 0;
#pragma unroll 1
    for (int i = threadIdx.x * 8; i < SAMPLED_TOKENS * HEAD_DIM; i += THREADS * 8) {
      float x[8];
      unpack_octet(x, sample.load(i / HEAD_DIM, i % HEAD_DIM));
#pragma unroll
      for (int c = 0; c < 8; ++c)
        most = max_magnitude(most, x[c]);
    }
    most = block_max(most);
    return most > 0 && most < INFINITY_F ? most : 1.0f;
  }
  ShareMaxima maxima;
  walk_tokens(sample, SAMPLED_TOKENS, [&](int, const Share& share) { maxima.take(share); });
  float largest[SHARE];
  maxima.unpack_to(largest);
  const float found = block_max(largest_magnitude(largest));
  return found > 0 && found < INFINITY_F ? found : 1.0f;
}

/// The largest over the tokens that share a scale of K, of each thread's own; every thread of them
/// gets it.
__device__ __forceinline__ float largest_of_scale(float x) {
  x = warp_max_nan(x);
  if constexpr (WARPS_A_SCALE == 2) {
    if (lane_id() == 0)
      shared.of_warp[warp_id()] = x;
    __syncthreads();
    x = max_nan(x, shared.of_warp[warp_id() ^ 1]);
    __syncthreads();
  }
  return x;
}

/// Each warp hands on the maxima of the thread's channels from the `first` on.
template <int COUNT>
__device__ __forceinline__ void hand_maxima(float (&largest)[COUNT], int first) {
  combine_lanes<COUNT, LANES_A_TOKEN>(largest, Larger());
  __syncthreads();
  if constexpr (HANDING_WARPS == WARPS) {
#pragma unroll
    for (int i = 0; i < COUNT / TOKENS_A_WARP; ++i)
      shared.of_warp[warp_id() * HEAD_DIM +
                     channel_of(first + first_combined<COUNT, LANES_A_TOKEN>() + i)] = largest[i];
    __syncthreads();
    return;
  }
#pragma unroll
  for (int turn = 0; turn < WARPS / HANDING_WARPS; ++turn) {
    if (turn == warp_id() / HANDING_WARPS) {
#pragma unroll
      for (int i = 0; i < COUNT / TOKENS_A_WARP; ++i) {
        float& place =
            shared.of_warp[warp_id() % HANDING_WARPS * HEAD_DIM +
                           channel_of(first + first_combined<COUNT, LANES_A_TOKEN>() + i)];
        place = turn == 0 ? largest[i] : max_nan(place, largest[i]);
      }
    }
    __syncthreads();
  }
}
/// MAXIMA_APART: does so with all maxima over the first `tokens`, some channels after the others.
/// prepare(x, token, i) gets 8 of the thread's channels, from its i-th on.
template <typename Prepare>
__device__ __forceinline__ void find_maxima(const Source& from, int tokens,
                                            const Prepare& prepare) {
  constexpr int COUNT = 16;
#pragma unroll 1
  for (int first = 0; first < SHARE; first += COUNT) {
    float largest[COUNT] = {};
#pragma unroll 1
    for (int turn = 0; turn * TOKENS_AT_ONCE < tokens; ++turn) {
      const int token = token_of_turn(turn);
#pragma unroll
      for (int i = 0; i < COUNT; i += 8) {
        float x[8];
        unpack_octet(x, from.load(token, channel_of(first + i)));
        prepare(x, token, first + i);
#pragma unroll
        for (int c = 0; c < 8; ++c)
          largest[i + c] = max_magnitude(largest[i + c], x[c]);
      }
    }
    hand_maxima(largest, first);
  }
}

/// From the maxima of the channels over each thread's tokens: the scale block's scales, and in
/// shared memory what its values are multiplied by. `head` is a sample of the head's tokens, which
/// tells its magnitude where the one given does not count. MAXIMA_APART: behind find_maxima().
template <int VECTORS = CHANNEL_VECTORS>
__device__ __forceinline__ void find_channel_scales(float (&largest)[SHARE], const Source& head,
                                                    float magnitude, float* scales, s64 block,
                                                    float* inverses) {
  if constexpr (BLOCK_SCALES) {
    const float all = block_max(largest_magnitude(largest));
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      largest[i] = all;
  }
  if constexpr (!MAXIMA_APART)
    hand_maxima(largest, 0);
  float maximum = 0;
  if (threadIdx.x < HEAD_DIM) {
#pragma unroll
    for (int warp = 0; warp < HANDING_WARPS; ++warp)
      maximum = max_nan(maximum, shared.of_warp[warp * HEAD_DIM + threadIdx.x]);
  }
  if constexpr (!BLOCK_SCALES) {
    const bool small = threadIdx.x < HEAD_DIM && maximum < LEAST_BESIDE &&
                       is_channel(threadIdx.x, head.channels) && head.end > 0;
    if (block_max(small ? 1.0f : 0.0f) > 0)
      magnitude = magnitude_of(head);
  }
  if (threadIdx.x < HEAD_DIM) {
    const ChannelScale scale = channel_scale(maximum, magnitude);
    float* vectors = scales + block * (VECTORS * HEAD_DIM) + sigma_slot(threadIdx.x);
    vectors[CHANNEL_SCALE * HEAD_DIM] = scale.value;
    vectors[CHANNEL_INVERSE * HEAD_DIM] = scale.inverse;
    inverses[threadIdx.x] = scale.levels;
  }
  __syncthreads();
}

/// Adds up what each thread summed over its quads, 8 channels; `sums` gets HEAD_DIM values.
__device__ __forceinline__ void add_up_channels(float (&x)[8], float* sums) {
  combine_lanes<8>(x, Sum());
  __syncthreads();
  shared.of_warp[warp_id() / WARPS_ACROSS * HEAD_DIM + QuadPlace().channel + first_combined<8>()] =
      x[0];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < WARPS_ALONG; ++i)
      total += shared.of_warp[i * HEAD_DIM + threadIdx.x];
    sums[threadIdx.x] = total;
  }
}

/// Brings into shared memory what is subtracted from a head's keys: what the caller gave, or their
/// mean, from the sums of chunks of them.
__device__ __forceinline__ void find_mean(const Params& p, const QueryHead& at) {
  constexpr int PARTS = THREADS / HEAD_DIM;
  const int channel = threadIdx.x % HEAD_DIM;
  if (p.given_k_mean != nullptr) {
    const s64 row = PACKED ? static_cast<s64>(packed_place().sequence) * p.heads_kv + at.kv_head
                           : at.flat_kv_head;
    const bool has = is_channel(channel, p.channels) && !at.has_no_keys();
    if (threadIdx.x < HEAD_DIM)
      shared.mean[channel] = has ? p.given_k_mean[row * p.channels + channel] : 0;
    return;
  }
  const int chunks = at.has_no_keys() ? 0 : mean_chunks(at.seq_kv());
  const float* partial = p.k_partial + at.first_chunk<MEAN_CHUNK>(chunks) * HEAD_DIM + channel;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < MOST_MEAN_CHUNKS; i += PARTS) {
    const int chunk = i + threadIdx.x / HEAD_DIM;
    sum += chunk < chunks ? partial[chunk * HEAD_DIM] : 0;
  }
  shared.of_warp[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float total = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      total += shared.of_warp[part * HEAD_DIM + channel];
    shared.mean[channel] = __fdiv_rn(total, static_cast<float>(maximum(1, at.seq_kv())));
  }
}

/// Brings into shared memory what is subtracted from a head's values, where SMOOTH_V, and writes it
/// beside a scale block's scales, for the forward.
__device__ __forceinline__ void find_value_mean(const Params& p, const QueryHead& at, s64 block) {
  if constexpr (SMOOTH_V) {
    const int channel = threadIdx.x;
    if (channel < HEAD_DIM) {
      const int chunks = at.has_no_keys() ? 0 : mean_chunks(at.seq_kv());
      const float* sums = value_sums(p) + at.first_chunk<MEAN_CHUNK>(chunks) * HEAD_DIM + channel;
      float total = 0;
#pragma unroll 8
      for (int chunk = 0; chunk < chunks; ++chunk)
        total += sums[chunk * HEAD_DIM];
      const float mean = __fdiv_rn(total, static_cast<float>(summed_values(at.seq_kv())));
      shared.mean[channel] = fabsf(mean) < INFINITY_F ? mean : 0;
      p.vt8_scale[(block * VALUE_VECTORS + CHANNEL_MEAN) * HEAD_DIM + sigma_slot(channel)] =
          shared.mean[channel];
    }
    __syncthreads();
  }
}

/// Finds what bounds dQ's sums of the head's queries, in every thread, after find_mean().
__device__ __forceinline__ KeyRange find_key_range(const Params& p, const QueryHead& at) {
  if constexpr (!DQ_SUM16)
    return {};
  constexpr int PARTS = THREADS / HEAD_DIM;
  const int channel = threadIdx.x % HEAD_DIM;
  const int chunks = at.has_no_keys() ? 0 : mean_chunks(at.seq_kv());
  const float* ranges = p.key_range + at.first_chunk<MEAN_CHUNK>(chunks) * KEY_RANGE_FLOATS;
  const float mean = SHIFTED ? shared.mean[channel] : 0;
  float largest_key = 0, longest_value = 0;
  for (int chunk = threadIdx.x / HEAD_DIM; chunk < chunks; chunk += PARTS) {
    const float* range = ranges + chunk * KEY_RANGE_FLOATS;
    largest_key = max_nan(largest_key, range[channel] - mean);
    largest_key = max_nan(largest_key, range[LOWEST_KEYS + channel] + mean);
    longest_value = max_nan(longest_value, range[LONGEST_VALUE]);
  }
  return {block_max(longest_value), block_max(largest_key)};
}

/// This is subtracted from a head's values where dP is summed in FP16.
__device__ __forceinline__ float* value_centre() {
  __shared__ __align__(16) float centre[HEAD_DIM];
  return centre;
}
/// Finds it, and what they are multiplied by then, in every thread.
__device__ __forceinline__ Power find_values(const Params& p, const QueryHead& at) {
  if constexpr (!DP16)
    return {};
  constexpr int PARTS = THREADS / HEAD_DIM;
  const int channel = threadIdx.x % HEAD_DIM;
  const int chunks = at.has_no_keys() ? 0 : mean_chunks(at.seq_kv());
  const float* ranges =
      value_range(p) + at.first_chunk<MEAN_CHUNK>(chunks) * VALUE_RANGE_FLOATS + channel;
  float sum = 0, highest = -INFINITY_F, lowest = -INFINITY_F;
  for (int chunk = threadIdx.x / HEAD_DIM; chunk < chunks; chunk += PARTS) {
    const float* range = ranges + chunk * VALUE_RANGE_FLOATS;
    sum += range[0];
    highest = max_nan(highest, range[HIGHEST_VALUES]);
    lowest = max_nan(lowest, range[LOWEST_VALUES]);
  }
  __syncthreads();
  shared.of_warp[threadIdx.x] = sum;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    total += shared.of_warp[part * HEAD_DIM + channel];
  const float mean = __fdiv_rn(total, static_cast<float>(maximum(1, at.seq_kv())));
  const float centre = fabsf(mean) < INFINITY_F ? mean : 0;
  if (threadIdx.x < HEAD_DIM)
    value_centre()[channel] = centre;
  const float largest = max_nan(max_nan(0, highest - centre), lowest + centre);
  return power_below(VALUE_EXPONENT, block_max(largest));
}

/// Computes the length of a token, over LENGTH_UNIT. Each lane of the quad has a share of its
/// channels.
__device__ __forceinline__ float length_of_token(const float (&x)[SHARE]) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    squares += x[i] * x[i];
  return length_of(token_sum(squares), token_max_nan(largest_magnitude(x)));
}

//===--- Rows for S --------------------------------------------------------===//

/// Rotates a token, as S has it.
__device__ __forceinline__ void rotate(float (&x)[SHARE]) {
  if constexpr (ROTATE)
    hadamard(x);
}

/// Writes a token's bytes to its place in the copy and gives back the scale that stands for them:
/// of zeros a positive one, so that a masked score of -inf stays -inf.
__device__ __forceinline__ float write_row(s8* copy, int token, const float (&x)[SHARE],
                                           float largest, float sign = 1) {
  const Scale scale = exact_scale(largest);
  const float n = scale.inverse * sign;
#pragma unroll
  for (int i = 0; i < SHARE; i += 8) {
    uint2 bytes;
    bytes.x = pack_s8(x[i] * n, x[i + 1] * n, x[i + 2] * n, x[i + 3] * n);
    bytes.y = pack_s8(x[i + 4] * n, x[i + 5] * n, x[i + 6] * n, x[i + 7] * n);
    const int channel = channel_of(i);
    *reinterpret_cast<uint2*>(copy + chunk_offset<HEAD_DIM>(token, channel / 16) + channel % 16) =
        bytes;
  }
  return scale.value;
}

/// Writes a token as it comes.
__device__ __forceinline__ void write_share(Element* copy, int token, const Share& share) {
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
    *reinterpret_cast<uint4*>(copy + chunk_offset<HEAD_DIM * 2>(token, channel_of(8 * j) / 8) / 2) =
        share.chunks[j];
}
/// Writes a token in 16 bits.
template <typename T>
__device__ __forceinline__ void write_elements(T* copy, int token, const float (&x)[SHARE]) {
#pragma unroll
  for (int i = 0; i < SHARE; i += 8)
    *reinterpret_cast<uint4*>(copy + chunk_offset<HEAD_DIM * 2>(token, channel_of(i) / 8) / 2) =
        make_uint4(pack<T>(x[i], x[i + 1]), pack<T>(x[i + 2], x[i + 3]),
                   pack<T>(x[i + 4], x[i + 5]), pack<T>(x[i + 6], x[i + 7]));
}

__device__ __forceinline__ void keep_maxima(float (&largest)[SHARE], const float (&x)[SHARE]) {
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    largest[i] = max_magnitude(largest[i], x[i]);
}
