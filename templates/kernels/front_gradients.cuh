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
#include "tile/prepass/front_ahead.cuh"

/// Adds up what the threads have of a head's gain, or of that of several heads.
__device__ __forceinline__ void add_gains(TokenRows& sums, const Octets& of_thread,
                                          const FrontLane& own, float* parts, int channels) {
  __syncthreads(); // what was there before has been read
#pragma unroll
  for (int i = 0; i < 16; ++i)
    sums[threadIdx.x / LANES][own.first[i / 8] + i % 8] = of_thread[i / 8][i % 8];
  __syncthreads();
  for (int channel = threadIdx.x; channel < HEAD_DIM && is_channel(channel, channels);
       channel += THREADS) {
    float sum = 0;
#pragma unroll
    for (int row = 0; row < TOKENS_AT_ONCE; ++row)
      sum += sums[row][channel];
    parts[channel] = sum;
  }
}

/// Where dx and the gradients of 1/rms and of a gain go.
template <typename Keys, typename Given>
__device__ __forceinline__ FrontPointer<Element> dx_of(const FrontSide<Keys, Given>& of,
                                                       const FrontPlace& at, int head, int heads) {
  const Params& p = of.p;
  return of.keys ? of.pointer(p.dk, p.dk_stride_b, p.dk_stride_h, p.dk_stride_s, at, head, heads)
                 : of.pointer(p.dq, p.dq_stride_b, p.dq_stride_h, p.dq_stride_s, at, head, heads);
}
template <typename Keys, typename Given>
__device__ __forceinline__ float* dinv_rms_of(const FrontSide<Keys, Given>& of) {
  return of.keys ? of.p.dk_inv_rms : of.p.dq_inv_rms;
}

template <typename Keys, typename Given>
__device__ __forceinline__ float* gain_parts_of(const FrontSide<Keys, Given>& of) {
  return of.keys ? of.p.k_gain_parts : of.p.q_gain_parts;
}

template <Pairs PAIRS, typename Side>
__device__ __forceinline__ void gradients(const Params& p, const Side& of, const FrontPlace& at,
                                          FrontShared<2>& shared) {
  const FrontLane own = front_lane<PAIRS>(p, of);
  // Heads that share a gain are walked over together, and others one after the other.
  const bool per_head = of.gain_step() != 0;
#pragma unroll 1
  for (int first = at.first_head, end; first < at.end_head; first = end) {
    end = per_head ? first + 1 : at.end_head;
    FrontWalk walk = {0, first}, ahead = walk;
    FrontPointer x_from = of.x(at, first, end - first);
    FrontPointer dy_from = of.y(at, first, end - first);
    FrontPointer dx_to = dx_of(of, at, first, end - first);
    const auto ask = [&](int slot) {
      if (ahead.turn == FRONT_TURNS)
        return;
      const bool is_token = front_token(at, ahead.turn) < of.tokens();
      shared.ahead.ask(slot, 0, x_from.at, own, is_token);
      shared.ahead.ask(slot, 1, dy_from.at, own, is_token);
      const bool turns = ahead.advance(first, end);
      x_from.advance(turns);
      dy_from.advance(turns);
    };
    FrontSlot slots;
    slots.begin(ask);
    Rotation<PAIRS> rotation;
    Octets gain, dgain = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      gain[i / 8][i % 8] = 1.0f;
    visit_gains(of, own, first, [&](int octet, int i, float of_head) { gain[octet][i] = of_head; });
#pragma unroll 1
    while (walk.turn < FRONT_TURNS) {
      const int place = front_token(at, walk.turn), token = minimum(place, of.tokens() - 1);
      const bool is_token = place < of.tokens();
      if (walk.head == first)
        rotation.load(p, of, own, at.batch, token, -1.0f);
      Octets x, dx;
      const auto read = [&](int slot) {
        shared.ahead.unpack_to(x, slot, 0);
        shared.ahead.unpack_to(dx, slot, 1);
      };
      slots.next(read, ask);
      rotation.apply(dx, p, of, own, at.batch, token, -1.0f, shared.rows);
      if (of.normed()) {
        float factor = front_factor(p, of, x, at.batch, walk.head, token);
        factor = is_token ? factor : 0.0f; // of zeros without eps it is infinite
#pragma unroll
        for (int i = 0; i < 16; ++i)
          dgain[i / 8][i % 8] += dx[i / 8][i % 8] * (x[i / 8][i % 8] * factor);
        float sum = 0; // of h x
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          dx[i / 8][i % 8] *= gain[i / 8][i % 8];
          sum += dx[i / 8][i % 8] * x[i / 8][i % 8];
        }
        sum = sum_of_token(sum);
        float mean = 0; // of h xhat
        if (of.inv_rms() == nullptr)
          mean = mean_of_channels(sum * factor, p.channels);
        else if (dinv_rms_of(of) != nullptr && is_token && threadIdx.x % LANES == 0)
          dinv_rms_of(
              of)[(static_cast<s64>(at.batch) * of.heads() + walk.head) * of.tokens() + place] =
              sum;
#pragma unroll
        for (int i = 0; i < 16; ++i)
          dx[i / 8][i % 8] = factor * (dx[i / 8][i % 8] - x[i / 8][i % 8] * factor * mean);
      }
      store_octets(dx_to.at, dx, own, is_token);
      dx_to.advance(walk.advance(first, end));
    }
    if (gain_parts_of(of) != nullptr)
      add_gains(shared.rows, dgain, own,
                gain_parts_of(of) + front_gain_part(p, of, at.batch, first, at.chunk), p.channels);
  }
}

/// Block (heads and tokens of the queries, behind them those of the keys). Bounds keep enough
/// threads on a multiprocessor, and with them loads.
extern "C" __global__ void __launch_bounds__(THREADS, 3) KERNEL(const __grid_constant__ Params p) {
  __shared__ FrontShared<2> shared;
  begin_in_stream_order();
  const FrontPlace at = front_place(p);
  of_block(p, at, [&](const auto& of, auto pairs) {
    gradients<decltype(pairs)::kind>(p, of, at, shared);
  });
}
