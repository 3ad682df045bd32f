//===- tile/prepass/front_rows.cuh - Norm and RoPE of a token's vector -------===//
//
// LANES lanes side by side have a token's channels, each two octets. Which ones is free, so that
// pairs of RoPE meet in one lane: of halves of channels a lane has an octet of the first half and
// the same of the second.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/front.cuh"
#include "ptx/convert.cuh"
#include "tile/walk/channels.cuh"

constexpr int LANES = HEAD_DIM / 16; ///< of a token
constexpr int TOKENS_AT_ONCE = THREADS / LANES;
constexpr int FRONT_TURNS = front_tokens(HEAD_DIM) / TOKENS_AT_ONCE;
constexpr u32 WHOLE_WARP = 0xffffffffu;
using Octets = float[2][8]; ///< a lane's part of a token
using TokenRows = float[TOKENS_AT_ONCE][HEAD_DIM];

/// A block's tokens, and its heads, which are neighbours.
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
         static_cast<int>(threadIdx.x) / LANES;
}

/// Walks over a thread's vectors: all heads of a token, which share its angles, then those of its
/// next token.
struct FrontWalk {
  int turn = 0, head;

  /// Whether it came to another token.
  __device__ __forceinline__ bool advance(int first_head, int end_head) {
    const bool turns = ++head == end_head;
    head = turns ? first_head : head;
    turn += turns ? 1 : 0;
    return turns;
  }
};
/// A vector in memory on such a walk.
template <typename T> struct FrontPointer {
  T* at;
  s64 to_head, to_token; ///< steps to the token's next head, and from its last to the next token

  __device__ __forceinline__ FrontPointer(T* first, s64 stride_h, s64 stride_s, int heads)
      : at(first), to_head(stride_h), to_token(TOKENS_AT_ONCE * stride_s - (heads - 1) * stride_h) {
  }
  __device__ __forceinline__ void advance(bool turns) { at += turns ? to_token : to_head; }
};

/// What a launch knows about the queries, or about the keys. A block has one of them, and reads
/// what it needs where the launch put it: in registers all this would take the place of loads.
template <typename Keys, typename Given> struct FrontSide {
  Keys keys;
  const Given& p; ///< of a kernel that may lack some of this

  __device__ __forceinline__ const float* cosines() const { return keys ? p.k_cos : p.q_cos; }
  __device__ __forceinline__ const float* sines() const { return keys ? p.k_sin : p.q_sin; }
  __device__ __forceinline__ s64 table_row(int batch, int token) const {
    return keys ? batch * p.k_table_stride_b + token * p.k_table_stride_s
                : batch * p.q_table_stride_b + token * p.q_table_stride_s;
  }
  __device__ __forceinline__ const float* gain() const { return keys ? p.k_gain : p.q_gain; }
  __device__ __forceinline__ int gain_step() const { return keys ? p.k_gain_step : p.q_gain_step; }
  __device__ __forceinline__ bool normed() const { return (keys ? p.k_normed : p.q_normed) != 0; }
  __device__ __forceinline__ const float* inv_rms() const {
    return keys ? p.k_inv_rms : p.q_inv_rms;
  }
  __device__ __forceinline__ int inv_rms_heads() const {
    return keys ? p.k_inv_rms_heads : p.q_inv_rms_heads;
  }
  __device__ __forceinline__ int heads() const { return keys ? p.heads_kv : p.heads; }
  __device__ __forceinline__ int tokens() const { return keys ? p.seq_kv : p.seq_q; }
  __device__ __forceinline__ FrontPointer<const Element> x(const FrontPlace& at, int head,
                                                           int heads) const {
    return keys ? pointer<const Element>(p.k, p.k_stride_b, p.k_stride_h, p.k_stride_s, at, head,
                                         heads)
                : pointer<const Element>(p.q, p.q_stride_b, p.q_stride_h, p.q_stride_s, at, head,
                                         heads);
  }
  /// y, or its gradient.
  __device__ __forceinline__ FrontPointer<Element> y(const FrontPlace& at, int head,
                                                     int heads) const {
    return keys ? pointer<Element>(p.front_k, p.front_k_stride_b, p.front_k_stride_h,
                                   p.front_k_stride_s, at, head, heads)
                : pointer<Element>(p.front_q, p.front_q_stride_b, p.front_q_stride_h,
                                   p.front_q_stride_s, at, head, heads);
  }
  /// From the first token of this thread and so many heads.
  template <typename T>
  static __device__ __forceinline__ FrontPointer<T> pointer(T* tensor, s64 stride_b, s64 stride_h,
                                                            s64 stride_s, const FrontPlace& at,
                                                            int head, int heads) {
    return {tensor + at.batch * stride_b + head * stride_h + front_token(at, 0) * stride_s,
            stride_h, stride_s, heads};
  }
};
/// How pairs of channels lie in lanes.
enum class Pairs {
  halves,      ///< channel i of a lane's first octet, and of its second one; or there are no pairs
  neighbours,  ///< channels 2 i and 2 i + 1 of an octet
  across_lanes ///< of halves that do not begin where octets do
};
template <typename Side>
__device__ __forceinline__ Pairs front_pairs(const Params& p, const Side& of) {
  if (of.cosines() == nullptr)
    return Pairs::halves;
  if (p.rope_interleaved != 0)
    return Pairs::neighbours;
  return p.rope_begin % 8 == 0 && p.rope_channels % 16 == 0 ? Pairs::halves : Pairs::across_lanes;
}

/// A lane's two octets of channels, which may lie behind the tensors' channels.
struct FrontLane {
  int first[2]; ///< channels
  bool exists[2];
  bool has_pairs; ///< Pairs::halves: whether these octets are rotated
};
template <Pairs PAIRS, typename Side>
__device__ __forceinline__ FrontLane front_lane(const Params& p, const Side& of) {
  const int lane = static_cast<int>(threadIdx.x) % LANES;
  const bool is_rotated = PAIRS == Pairs::halves && of.cosines() != nullptr;
  const int paired = is_rotated ? p.rope_channels / 16 : 0; // lanes
  const int begin = p.rope_begin / 8;
  FrontLane own;
  own.has_pairs = lane < paired;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    int octet = lane - paired + j * (LANES - paired); // of those that are not rotated
    octet += paired > 0 && octet >= begin ? 2 * paired : 0;
    if (own.has_pairs)
      octet = begin + lane + j * paired;
    own.first[j] = octet * 8;
    own.exists[j] = is_channel(octet * 8, p.channels);
  }
  return own;
}

__device__ __forceinline__ void unpack_octets(Octets& x, const uint4 (&words)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const u32 pairs[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Element>(pairs[i]);
      x[j][2 * i] = pair.x, x[j][2 * i + 1] = pair.y;
    }
  }
}
__device__ __forceinline__ void store_octets(Element* token, const Octets& x, const FrontLane& own,
                                             bool is_token) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (own.exists[j] && is_token)
      *reinterpret_cast<uint4*>(token + own.first[j]) = {
          pack<Element>(x[j][0], x[j][1]), pack<Element>(x[j][2], x[j][3]),
          pack<Element>(x[j][4], x[j][5]), pack<Element>(x[j][6], x[j][7])};
  }
}

/// The sum over the lanes of a token, in an order that is always the same.
__device__ __forceinline__ float sum_of_token(float sum) {
#pragma unroll
  for (int with = LANES / 2; with > 0; with /= 2)
    sum += __shfl_xor_sync(WHOLE_WARP, sum, with);
  return sum;
}
/// sum / channels, rounded correctly. A product with a power of two is.
__device__ __forceinline__ float mean_of_channels(float sum, int channels) {
  return channels == HEAD_DIM ? sum * (1.0f / HEAD_DIM)
                              : __fdiv_rn(sum, static_cast<float>(channels));
}

/// What a token is multiplied by: 1/rms, given or formed of `x`, or 1 without a norm. Square root
/// and division are rounded correctly. A token that is none has `token` clamped.
template <typename Side>
__device__ __forceinline__ float front_factor(const Params& p, const Side& of, const Octets& x,
                                              int batch, int head, int token) {
  if (!of.normed())
    return 1.0f;
  if (of.inv_rms() != nullptr) {
    const s64 row =
        static_cast<s64>(batch) * of.inv_rms_heads() + (of.inv_rms_heads() == 1 ? 0 : head);
    return __ldg(of.inv_rms() + row * of.tokens() + token);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    sum += x[i / 8][i % 8] * x[i / 8][i % 8];
  return __frcp_rn(__fsqrt_rn(mean_of_channels(sum_of_token(sum), p.channels) + p.norm_eps));
}

/// Calls take(octet, channel, gain) with the gains of a head's channels of this lane, if there are
/// any.
template <typename Side, typename Take>
__device__ __forceinline__ void visit_gains(const Side& of, const FrontLane& own, int head,
                                            const Take& take) {
  if (of.gain() == nullptr)
    return;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!own.exists[j])
      continue;
    const float* from = of.gain() + head * of.gain_step() + own.first[j];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + 4 * half));
      take(j, 4 * half, four.x), take(j, 4 * half + 1, four.y);
      take(j, 4 * half + 2, four.z), take(j, 4 * half + 3, four.w);
    }
  }
}
/// Where the parts of the gradient of a gain begin that a block has: rows of channels, by sequence,
/// head, or heads that a block takes where all share a gain, and chunk of tokens.
template <typename Side>
__device__ __forceinline__ s64 front_gain_part(const Params& p, const Side& of, int batch, int head,
                                               int chunk) {
  const bool per_head = of.gain_step() != 0;
  const int groups = per_head ? of.heads() : ceil_div(of.heads(), p.front_heads);
  const s64 group = static_cast<s64>(batch) * groups + (per_head ? head : head / p.front_heads);
  return (group * ceil_div(of.tokens(), front_tokens(HEAD_DIM)) + chunk) * p.channels;
}

/// Rotates a token's channels from rope_begin on by the angles of its row of the table. All heads
/// of a token share them. Four neighbouring channels are in one half as a whole, because rope_begin
/// and half of the channels are multiples of four (of neighbours: their number is).
template <Pairs PAIRS> struct Rotation {
  float c[8], s[8]; ///< of a lane's eight pairs; across_lanes: none

  /// With `sign` = -1 by the negative angles.
  template <typename Side>
  __device__ __forceinline__ void load(const Params& p, const Side& of, const FrontLane& own,
                                       int batch, int token, float sign) {
    const s64 row = of.table_row(batch, token);
    if (PAIRS == Pairs::halves && own.has_pairs) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const s64 place = row + own.first[0] - p.rope_begin + 4 * half;
        put(c + 4 * half, __ldg(reinterpret_cast<const float4*>(of.cosines() + place)), 1.0f);
        put(s + 4 * half, __ldg(reinterpret_cast<const float4*>(of.sines() + place)), sign);
      }
    }
    if constexpr (PAIRS == Pairs::neighbours) {
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        const int channel = four_of_lane(p, own, four);
        if (!rotates(p, channel))
          continue;
        const s64 place = row + channel / 2;
        const float2 cosine = __ldg(reinterpret_cast<const float2*>(of.cosines() + place));
        const float2 sine = __ldg(reinterpret_cast<const float2*>(of.sines() + place));
        c[2 * four] = cosine.x, c[2 * four + 1] = cosine.y;
        s[2 * four] = sine.x * sign, s[2 * four + 1] = sine.y * sign;
      }
    }
  }
  /// `rows` are for across_lanes, where all lanes of a warp call it together.
  template <typename Side>
  __device__ __forceinline__ void apply(Octets& x, const Params& p, const Side& of,
                                        const FrontLane& own, int batch, int token, float sign,
                                        TokenRows& rows) const {
    if (PAIRS == Pairs::halves && own.has_pairs) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        rotate(x[0][i], x[1][i], c[i], s[i]);
    }
    if constexpr (PAIRS == Pairs::neighbours) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (rotates(p, four_of_lane(p, own, i / 2)))
          rotate(x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1], c[i], s[i]);
    }
    if constexpr (PAIRS == Pairs::across_lanes)
      rotate_across(x, p, of, own, of.table_row(batch, token), sign, rows[threadIdx.x / LANES]);
  }

private:
  static __device__ __forceinline__ void put(float* to, float4 four, float times) {
    to[0] = four.x * times, to[1] = four.y * times;
    to[2] = four.z * times, to[3] = four.w * times;
  }
  static __device__ __forceinline__ int four_of_lane(const Params& p, const FrontLane& own,
                                                     int four) {
    return own.first[four / 2] + four % 2 * 4 - p.rope_begin;
  }
  static __device__ __forceinline__ bool rotates(const Params& p, int channel) {
    return channel >= 0 && channel < p.rope_channels;
  }
  static __device__ __forceinline__ void rotate(float& a, float& b, float c, float s) {
    const float first = a;
    a = __fmaf_rn(-s, b, __fmul_rn(a, c));
    b = __fmaf_rn(s, first, __fmul_rn(b, c));
  }
  template <typename Side>
  static __device__ __forceinline__ void rotate_across(Octets& x, const Params& p, const Side& of,
                                                       const FrontLane& own, s64 row, float sign,
                                                       float* token) {
    __syncwarp(); // what was there before has been read
#pragma unroll
    for (int i = 0; i < 16; ++i)
      token[own.first[i / 8] + i % 8] = x[i / 8][i % 8];
    __syncwarp();
    const int apart = p.rope_channels / 2;
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const int channel = four_of_lane(p, own, four);
      if (!rotates(p, channel))
        continue;
      const bool is_second = channel >= apart;
      const int angle = is_second ? channel - apart : channel;
      float others[4], cosines[4], sines[4];
      put(others,
          *reinterpret_cast<const float4*>(token + p.rope_begin +
                                           (is_second ? angle : angle + apart)),
          1.0f);
      put(cosines, __ldg(reinterpret_cast<const float4*>(of.cosines() + row + angle)), 1.0f);
      put(sines, __ldg(reinterpret_cast<const float4*>(of.sines() + row + angle)),
          is_second ? sign : -sign);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& own_x = x[four / 2][four % 2 * 4 + i];
        own_x = __fmaf_rn(sines[i], others[i], __fmul_rn(own_x, cosines[i]));
      }
    }
  }
};

template <Pairs KIND> struct PairsAre { static constexpr Pairs kind = KIND; };
struct Yes {
  __device__ __forceinline__ constexpr operator bool() const { return true; }
};
struct No {
  __device__ __forceinline__ constexpr operator bool() const { return false; }
};
/// Calls run(side, pairs) with what a block has. Each way of pairs has code of its own, since what
/// the others need would take its registers. So have queries and keys on Blackwell, for which the
/// compiler keeps more of what they differ in; elsewhere that would only take longer to compile.
template <typename Run>
__device__ __forceinline__ void of_block(const Params& p, const FrontPlace& at, const Run& run) {
  const auto of_side = [&](const auto& of) {
    const Pairs pairs = front_pairs(p, of);
    if (pairs == Pairs::halves)
      run(of, PairsAre<Pairs::halves>());
    else if (pairs == Pairs::neighbours)
      run(of, PairsAre<Pairs::neighbours>());
    else
      run(of, PairsAre<Pairs::across_lanes>());
  };
#if __CUDA_ARCH__ >= 1000
  if (at.is_of_keys)
    of_side(FrontSide<Yes, Params>{{}, p});
  else
    of_side(FrontSide<No, Params>{{}, p});
#else
  of_side(FrontSide<bool, Params>{at.is_of_keys, p});
#endif
}
