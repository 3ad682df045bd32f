//===- kernels/front_gradients.cuh - Gradients of norm and RoPE -------------===//
//
// From dy = front_q and front_k, and x = q and k: dn is dy rotated back, h = gain * dn, and
// dx = r (h - xhat mean(h xhat)) with xhat = x r, where r = 1/rms is formed again as kernels/front
// forms it. Where r was given it is r h, and r's own gradient is sum(h x) of each token and head.
// A gain's gradient is the sum of dn xhat over tokens: each block has its tokens' sums, which
// kernels/front_gains adds up.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/prepass/front_rows.cuh"

constexpr int LOADS = 2; ///< turns whose loads are under way together
using SumsOfThreads = float[TOKENS_AT_ONCE][HEAD_DIM];

/// Adds up what the threads have of a head's gain.
__device__ __forceinline__ void add_gains(SumsOfThreads& sums, const float (&of_thread)[8],
                                          float* parts, int channels) {
  __syncthreads(); // the head before this one has been read
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sums[threadIdx.x / OCTETS][front_octet() * 8 + i] = of_thread[i];
  __syncthreads();
  if (const int channel = threadIdx.x; channel < HEAD_DIM && is_channel(channel, channels)) {
    float sum = 0;
#pragma unroll
    for (int row = 0; row < TOKENS_AT_ONCE; ++row)
      sum += sums[row][channel];
    parts[channel] = sum;
  }
}

/// Block (heads and tokens of the queries, behind them those of the keys). Bounds keep enough
/// threads on a multiprocessor, and with them loads.
extern "C" __global__ void __launch_bounds__(THREADS, 2) KERNEL(const __grid_constant__ Params p) {
  __shared__ SumsOfThreads sums;
  begin_in_stream_order();
  const FrontPlace at = front_place(p);
  const FrontTensor of = at.is_of_keys ? front_keys(p) : front_queries(p);
  const s64 x_stride_h = at.is_of_keys ? p.k_stride_h : p.q_stride_h;
  const s64 x_stride_s = at.is_of_keys ? p.k_stride_s : p.q_stride_s;
  const s64 dy_stride_h = at.is_of_keys ? p.front_k_stride_h : p.front_q_stride_h;
  const s64 dy_stride_s = at.is_of_keys ? p.front_k_stride_s : p.front_q_stride_s;
  const s64 dx_stride_h = at.is_of_keys ? p.dk_stride_h : p.dq_stride_h;
  const s64 dx_stride_s = at.is_of_keys ? p.dk_stride_s : p.dq_stride_s;
  const int channel = front_octet() * 8;
  const bool exists = is_channel(channel, p.channels);
  const Element* x_from =
      (at.is_of_keys ? p.k + at.batch * p.k_stride_b : p.q + at.batch * p.q_stride_b) + channel;
  const Element* dy_from = (at.is_of_keys ? p.front_k + at.batch * p.front_k_stride_b
                                          : p.front_q + at.batch * p.front_q_stride_b) +
                           channel;
  Element* dx_to =
      (at.is_of_keys ? p.dk + at.batch * p.dk_stride_b : p.dq + at.batch * p.dq_stride_b) + channel;
  float* gain_parts = at.is_of_keys ? p.k_gain_parts : p.q_gain_parts;
  float* dinv_rms = at.is_of_keys ? p.dk_inv_rms : p.dq_inv_rms;
  const int chunks = ceil_div(of.tokens, front_tokens(HEAD_DIM));

#pragma unroll 1
  for (int head = at.first_head; head < at.end_head; ++head) {
    const s64 flat_head = static_cast<s64>(at.batch) * of.heads + head;
    float gain[8], dgain[8] = {};
    load_gain(gain, p, of, head);
#pragma unroll 1
    for (int turns = 0; turns < FRONT_TURNS; turns += LOADS) {
      uint4 x_words[LOADS], dy_words[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int token = minimum(front_token(at, turns + i), of.tokens - 1);
        x_words[i] = {}, dy_words[i] = {};
        if (exists) {
          x_words[i] =
              *reinterpret_cast<const uint4*>(x_from + head * x_stride_h + token * x_stride_s);
          dy_words[i] =
              *reinterpret_cast<const uint4*>(dy_from + head * dy_stride_h + token * dy_stride_s);
        }
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int place = front_token(at, turns + i), token = minimum(place, of.tokens - 1);
        const bool is_token = place < of.tokens;
        float x[8], dx[8];
        unpack_octet(dx, dy_words[i]);
        rotate_token(dx, p, of, at.batch, token, -1.0f);
        if (of.normed) {
          unpack_octet(x, x_words[i]);
          const float factor = front_factor(p, of, x, at.batch, head, token);
          float sum = 0; // of h x
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            if (is_token)
              dgain[c] += dx[c] * (x[c] * factor);
            dx[c] *= gain[c];
            sum += dx[c] * x[c];
          }
          sum = sum_of_token(sum);
          float mean = 0; // of h xhat
          if (of.inv_rms == nullptr)
            mean = __fdiv_rn(sum * factor, static_cast<float>(p.channels));
          else if (dinv_rms != nullptr && is_token && channel == 0)
            dinv_rms[flat_head * of.tokens + token] = sum;
#pragma unroll
          for (int c = 0; c < 8; ++c)
            dx[c] = factor * (dx[c] - x[c] * factor * mean);
        }
        if (exists && is_token)
          *reinterpret_cast<uint4*>(dx_to + head * dx_stride_h + token * dx_stride_s) =
              pack_octet(dx);
      }
    }
    if (gain_parts != nullptr)
      add_gains(sums, dgain, gain_parts + (flat_head * chunks + at.chunk) * p.channels, p.channels);
  }
}
