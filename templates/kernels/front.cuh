//===- kernels/front.cuh - Norm and RoPE of queries and keys ----------------===//
//
// front_q and front_k are y = RoPE(norm(x)) of q and k: n = x / rms(x) * gain over the channels of
// a head, or x times a given 1/rms, or x; then channels from rope_begin on are rotated by a table.
// Everything is FP32 of x and rounded once. Reads and writes every element once.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/prepass/front_ahead.cuh"

template <Pairs PAIRS, typename Side>
__device__ __forceinline__ void normed_and_rotated(const Params& p, const Side& of,
                                                   const FrontPlace& at, FrontShared<1>& shared) {
  const FrontLane own = front_lane<PAIRS>(p, of);
  FrontWalk walk = {0, at.first_head}, ahead = walk;
  FrontPointer from = of.x(at, at.first_head, at.end_head - at.first_head);
  FrontPointer to = of.y(at, at.first_head, at.end_head - at.first_head);
  const auto ask = [&](int slot) {
    if (ahead.turn == FRONT_TURNS)
      return;
    shared.ahead.ask(slot, 0, from.at, own, front_token(at, ahead.turn) < of.tokens());
    from.advance(ahead.advance(at.first_head, at.end_head));
  };
  FrontSlot slots;
  slots.begin(ask);
  Rotation<PAIRS> rotation;
#pragma unroll 1
  while (walk.turn < FRONT_TURNS) {
    const int place = front_token(at, walk.turn), token = minimum(place, of.tokens() - 1);
    if (walk.head == at.first_head)
      rotation.load(p, of, own, at.batch, token, 1.0f);
    Octets x;
    slots.next([&](int slot) { shared.ahead.unpack_to(x, slot, 0); }, ask);
    const float factor = front_factor(p, of, x, at.batch, walk.head, token);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      x[i / 8][i % 8] *= factor;
    // They are read again for each vector, so that they take no registers while others are loaded.
    visit_gains(of, own, walk.head, [&](int octet, int i, float gain) { x[octet][i] *= gain; });
    rotation.apply(x, p, of, own, at.batch, token, 1.0f, shared.rows);
    store_octets(to.at, x, own, place < of.tokens());
    to.advance(walk.advance(at.first_head, at.end_head));
  }
}

/// Block (heads and tokens of the queries, behind them those of the keys). Bounds keep enough
/// threads on a multiprocessor, and with them loads.
extern "C" __global__ void __launch_bounds__(THREADS, 5) KERNEL(const __grid_constant__ Params p) {
  __shared__ FrontShared<1> shared;
  begin_in_stream_order();
  const FrontPlace at = front_place(p);
  of_block(p, at, [&](const auto& of, auto pairs) {
    normed_and_rotated<decltype(pairs)::kind>(p, of, at, shared);
  });
}
