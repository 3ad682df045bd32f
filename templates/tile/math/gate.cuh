//===- tile/math/gate.cuh - Gates of outputs, and where their vectors lie ----===//
//
// A gated output is out * sigmoid(gate), channel by channel, in FP32. A block has some tokens of a
// head, and a thread an octet of channels of several of them, all of whose loads are under way
// together.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/front.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/walk/channels.cuh"

constexpr int OCTETS = HEAD_DIM / 8;
constexpr int TOKENS_AT_ONCE = THREADS / OCTETS;
constexpr int TURNS = front_tokens(HEAD_DIM) / TOKENS_AT_ONCE;

/// sigmoid(x) and sigmoid(-x), each with the precision of FP32: 1 less the first would have none
/// where it is nearly 1.
struct Shares {
  float open, shut;
};
__device__ __forceinline__ Shares shares_of(float gate) {
  const float e = exp2_approx(-fabsf(gate) * LOG2_E), near_one = __frcp_rn(1.0f + e),
              near_zero = e * near_one;
  return gate >= 0 ? Shares{near_one, near_zero} : Shares{near_zero, near_one};
}

/// A block's tokens of one head.
struct GatePlace {
  int batch, head, first_token;
};
__device__ __forceinline__ GatePlace gate_place(const Params& p) {
  const u32 chunks = ceil_div(p.seq_q, front_tokens(HEAD_DIM)), row = blockIdx.x / chunks;
  return {static_cast<int>(row / p.heads), static_cast<int>(row % p.heads),
          static_cast<int>(blockIdx.x % chunks) * front_tokens(HEAD_DIM)};
}
__device__ __forceinline__ int gate_token(const GatePlace& at, int turn) {
  return at.first_token + turn * TOKENS_AT_ONCE + static_cast<int>(threadIdx.x) / OCTETS;
}

/// A thread's vectors of a tensor.
template <typename T> struct GateVectors {
  T* first; ///< of token 0
  s64 stride;

  __device__ __forceinline__ GateVectors(T* tensor, s64 stride_b, s64 stride_h, s64 stride_s,
                                         const GatePlace& at)
      : first(tensor + at.batch * stride_b + at.head * stride_h + threadIdx.x % OCTETS * 8),
        stride(stride_s) {}
  __device__ __forceinline__ uint4 load(int token) const {
    return *reinterpret_cast<const uint4*>(first + token * stride);
  }
  __device__ __forceinline__ void store(int token, const float (&x)[8]) const {
    *reinterpret_cast<uint4*>(first + token * stride) = {
        pack<Element>(x[0], x[1]), pack<Element>(x[2], x[3]), pack<Element>(x[4], x[5]),
        pack<Element>(x[6], x[7])};
  }
};
__device__ __forceinline__ void unpack_octet(float (&x)[8], const uint4& words) {
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(pairs[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
/// Whether a thread has channels of a token that exists.
__device__ __forceinline__ bool has_octet(const Params& p, int token) {
  return token < p.seq_q && is_channel(threadIdx.x % OCTETS * 8, p.channels);
}
