//===- kernels/gate.cuh - Gated outputs ---------------------------------------===//
//
// gated = out * sigmoid(gate), rounded once. Reads and writes every element once.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/math/gate.cuh"

/// Block (tokens of a head).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const GatePlace at = gate_place(p);
  const GateVectors<const Element> outs(p.out, p.out_stride_b, p.out_stride_h, p.out_stride_s, at);
  const GateVectors<const Element> gates(p.gate, p.gate_stride_b, p.gate_stride_h, p.gate_stride_s,
                                         at);
  const GateVectors<Element> to(p.gated, p.gated_stride_b, p.gated_stride_h, p.gated_stride_s, at);
  uint4 out_words[TURNS], gate_words[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    if (const int token = gate_token(at, i); has_octet(p, token))
      out_words[i] = outs.load(token), gate_words[i] = gates.load(token);
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int token = gate_token(at, i);
    if (!has_octet(p, token))
      continue;
    float out[8], gate[8];
    unpack_octet(out, out_words[i]);
    unpack_octet(gate, gate_words[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c)
      out[c] *= shares_of(gate[c]).open;
    to.store(token, out);
  }
}
