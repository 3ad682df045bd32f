//===- tile/prepass/front_rows.cuh - Norm and RoPE of a token's vector -------===//
//
// OCTETS lanes side by side have a token's channels, eight each. A launch has two tensors, of
// queries and of keys, which differ in all that FrontTensor says.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/front.cuh"
#include "ptx/convert.cuh"
#include "tile/walk/channels.cuh"

constexpr int OCTETS = HEAD_DIM / 8;
constexpr int TOKENS_AT_ONCE = THREADS / OCTETS;
constexpr int FRONT_TURNS = front_tokens(HEAD_DIM) / TOKENS_AT_ONCE;
constexpr u32 WHOLE_WARP = 0xffffffffu;

/// What a launch knows about the queries, or about the keys.
struct FrontTensor {
  const float *cosines, *sines; ///< null: no RoPE
  s64 table_stride_b, table_stride_s;
  const float* gain;    ///< null: none
  int gain_step;        ///< from a head's to the next one's
  const float* inv_rms; ///< null: not given
  int inv_rms_heads;    ///< 1: all heads share them
  bool normed;
  int heads, tokens;
};
__device__ __forceinline__ FrontTensor front_queries(const Params& p) {
  return {p.q_cos,       p.q_sin,     p.q_table_stride_b, p.q_table_stride_s, p.q_gain,
          p.q_gain_step, p.q_inv_rms, p.q_inv_rms_heads,  p.q_normed != 0,    p.heads,
          p.seq_q};
}
__device__ __forceinline__ FrontTensor front_keys(const Params& p) {
  return {p.k_cos,       p.k_sin,     p.k_table_stride_b, p.k_table_stride_s, p.k_gain,
          p.k_gain_step, p.k_inv_rms, p.k_inv_rms_heads,  p.k_normed != 0,    p.heads_kv,
          p.seq_kv};
}

/// A block's tokens, and its heads, which are neighbours: a token's row of the table then comes
/// from the cache for all of them but the first.
struct FrontPlace {
  bool is_of_keys;
  int batch, first_head, end_head, chunk;
};
/// The blocks of the queries of all sequences come first, behind them those of the keys.
__device__ __forceinline__ FrontPlace front_place(const Params& p) {
  constexpr int TOKENS = front_tokens(HEAD_DIM);
  const u32 chunks_q = ceil_div(p.seq_q, TOKENS), groups_q = ceil_div(p.heads, p.front_heads);
  const u32 of_queries = static_cast<u32>(p.sequences) * groups_q * chunks_q;
  FrontPlace at;
  at.is_of_keys = blockIdx.x >= of_queries;
  const u32 place = at.is_of_keys ? blockIdx.x - of_queries : blockIdx.x;
  const u32 chunks = at.is_of_keys ? ceil_div(p.seq_kv, TOKENS) : chunks_q;
  const int heads = at.is_of_keys ? p.heads_kv : p.heads;
  const u32 groups = at.is_of_keys ? ceil_div(p.heads_kv, p.front_heads) : groups_q;
  at.chunk = static_cast<int>(place % chunks);
  at.first_head = static_cast<int>(place / chunks % groups) * p.front_heads;
  at.end_head = minimum(at.first_head + p.front_heads, heads);
  at.batch = static_cast<int>(place / chunks / groups);
  return at;
}
/// The token of this thread in a turn, which may be none.
__device__ __forceinline__ int front_token(const FrontPlace& at, int turn) {
  return at.chunk * front_tokens(HEAD_DIM) + turn * TOKENS_AT_ONCE +
         static_cast<int>(threadIdx.x) / OCTETS;
}
__device__ __forceinline__ int front_octet() { return static_cast<int>(threadIdx.x) % OCTETS; }

__device__ __forceinline__ void unpack_octet(float (&x)[8], const uint4& words) {
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(pairs[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ uint4 pack_octet(const float (&x)[8]) {
  return {pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]),
          pack<Element>(x[6], x[7])};
}

/// The sum over the lanes of a token, in an order that is always the same.
__device__ __forceinline__ float sum_of_token(float sum) {
#pragma unroll
  for (int with = OCTETS / 2; with > 0; with /= 2)
    sum += __shfl_xor_sync(WHOLE_WARP, sum, with);
  return sum;
}

/// What a token is multiplied by: 1/rms, given or formed of `x`, or 1 without a norm. Square root
/// and division are rounded correctly. A token that is none has `token` clamped.
__device__ __forceinline__ float front_factor(const Params& p, const FrontTensor& of,
                                              const float (&x)[8], int batch, int head, int token) {
  if (!of.normed)
    return 1.0f;
  if (of.inv_rms != nullptr) {
    const s64 row = static_cast<s64>(batch) * of.inv_rms_heads + (of.inv_rms_heads == 1 ? 0 : head);
    return __ldg(of.inv_rms + row * of.tokens + token);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sum += x[i] * x[i];
  const float mean = __fdiv_rn(sum_of_token(sum), static_cast<float>(p.channels));
  return __fdiv_rn(1.0f, __fsqrt_rn(mean + p.norm_eps));
}

/// A head's gains of this lane's channels; 1 without gains.
__device__ __forceinline__ void load_gain(float (&gain)[8], const Params& p, const FrontTensor& of,
                                          int head) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    gain[i] = 1.0f;
  if (of.gain == nullptr || !is_channel(front_octet() * 8, p.channels))
    return;
  const float* from = of.gain + static_cast<s64>(head) * of.gain_step + front_octet() * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from + 4 * half));
    gain[4 * half] = four.x, gain[4 * half + 1] = four.y;
    gain[4 * half + 2] = four.z, gain[4 * half + 3] = four.w;
  }
}

/// Rotates pairs (i, i + R/2). `x` are four neighbours, and `others` those with which they are
/// pairs.
__device__ __forceinline__ void rotate_halves(float* x, const float (&others)[4], float4 cosine,
                                              float4 sine, float sign) {
  const float c[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
  const float s[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = x[i] * c[i] + sign * s[i] * others[i];
}

/// Rotates a token's channels from rope_begin on by the angles of its row of the table; with
/// `sign` = -1 by the negative angles. Four neighbours are in one half as a whole, because
/// rope_begin and half of the channels are multiples of four (interleaved: their number is).
/// All lanes of a warp call it together.
__device__ __forceinline__ void rotate_token(float (&x)[8], const Params& p, const FrontTensor& of,
                                             int batch, int token, float sign) {
  if (of.cosines == nullptr)
    return;
  const s64 row = batch * of.table_stride_b + token * of.table_stride_s;
  const int first = front_octet() * 8 - p.rope_begin;
  if (p.rope_interleaved != 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = first + 4 * half;
      if (channel < 0 || channel >= p.rope_channels)
        continue;
      const float2 c = __ldg(reinterpret_cast<const float2*>(of.cosines + row + channel / 2));
      float2 s = __ldg(reinterpret_cast<const float2*>(of.sines + row + channel / 2));
      s.x *= sign, s.y *= sign;
      float* four = x + 4 * half;
      const float even[2] = {four[0], four[2]};
      four[0] = even[0] * c.x - four[1] * s.x;
      four[1] = four[1] * c.x + even[0] * s.x;
      four[2] = even[1] * c.y - four[3] * s.y;
      four[3] = four[3] * c.y + even[1] * s.y;
    }
    return;
  }
  const int apart = p.rope_channels / 2;
  const bool crosses = apart % 8 != 0; // the first four of a lane meet the last four of another
  float others[2][4];
  bool rotates[2], is_second[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = first + 4 * half;
    rotates[half] = channel >= 0 && channel < p.rope_channels;
    is_second[half] = channel >= apart;
    const int with = channel + (is_second[half] ? -apart : apart) + p.rope_begin;
    const int lane = rotates[half] ? lane_id() - front_octet() + with / 8 : lane_id();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      others[half][i] =
          __shfl_sync(WHOLE_WARP, crosses ? x[4 * (1 - half) + i] : x[4 * half + i], lane);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!rotates[half])
      continue;
    const s64 place = row + first + 4 * half - (is_second[half] ? apart : 0);
    rotate_halves(
        x + 4 * half, others[half], __ldg(reinterpret_cast<const float4*>(of.cosines + place)),
        __ldg(reinterpret_cast<const float4*>(of.sines + place)), is_second[half] ? sign : -sign);
  }
}
