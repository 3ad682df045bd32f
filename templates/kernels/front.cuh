//===- kernels/front.cuh - Norm and RoPE of queries and keys ----------------===//
//
// front_q and front_k are y = RoPE(norm(x)) of q and k: n = x / rms(x) * gain over the channels of
// a head, or x times a given 1/rms, or x; then channels from rope_begin on are rotated by a table.
// Everything is FP32 of x and rounded once. Reads and writes every element once.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/prepass/front_rows.cuh"

constexpr int LOADS = 2; ///< turns whose loads are under way together

/// Block (heads and tokens of the queries, behind them those of the keys). Bounds keep enough
/// threads on a multiprocessor, and with them loads.
extern "C" __global__ void __launch_bounds__(THREADS, 3) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const FrontPlace at = front_place(p);
  const FrontTensor of = at.is_of_keys ? front_keys(p) : front_queries(p);
  const s64 stride_h = at.is_of_keys ? p.k_stride_h : p.q_stride_h;
  const s64 stride_s = at.is_of_keys ? p.k_stride_s : p.q_stride_s;
  const s64 to_stride_h = at.is_of_keys ? p.front_k_stride_h : p.front_q_stride_h;
  const s64 to_stride_s = at.is_of_keys ? p.front_k_stride_s : p.front_q_stride_s;
  const int channel = front_octet() * 8;
  const bool exists = is_channel(channel, p.channels);
  const Element* from =
      (at.is_of_keys ? p.k + at.batch * p.k_stride_b : p.q + at.batch * p.q_stride_b) + channel;
  Element* to = (at.is_of_keys ? p.front_k + at.batch * p.front_k_stride_b
                               : p.front_q + at.batch * p.front_q_stride_b) +
                channel;

#pragma unroll 1
  for (int head = at.first_head; head < at.end_head; ++head) {
#pragma unroll 1
    for (int turns = 0; turns < FRONT_TURNS; turns += LOADS) {
      uint4 words[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int token = minimum(front_token(at, turns + i), of.tokens - 1);
        words[i] = {};
        if (exists)
          words[i] = *reinterpret_cast<const uint4*>(from + head * stride_h + token * stride_s);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int place = front_token(at, turns + i), token = minimum(place, of.tokens - 1);
        float x[8];
        unpack_octet(x, words[i]);
        const float factor = front_factor(p, of, x, at.batch, head, token);
        float gain[8]; // read again, so that it takes no registers while others are loaded
        load_gain(gain, p, of, head);
#pragma unroll
        for (int c = 0; c < 8; ++c)
          x[c] = x[c] * factor * gain[c];
        rotate_token(x, p, of, at.batch, token, 1.0f);
        if (exists && place < of.tokens)
          *reinterpret_cast<uint4*>(to + head * to_stride_h + token * to_stride_s) = pack_octet(x);
      }
    }
  }
}
