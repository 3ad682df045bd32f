//===- kernels/gate_gradients.cuh - Gradients of gated outputs ---------------===//
//
// From the gradient of gated outputs: gate_dout = dgated * s is that of outputs, and dgate = dgated
// * out * s * (1 - s) that of gates, with s = sigmoid(gate), each rounded once.
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
  const GateVectors<const Element> dgated(p.gated, p.gated_stride_b, p.gated_stride_h,
                                          p.gated_stride_s, at);
  const GateVectors<Element> douts(p.gate_dout, p.gate_dout_stride_b, p.gate_dout_stride_h,
                                   p.gate_dout_stride_s, at);
  const GateVectors<Element> dgates(p.dgate, p.dgate_stride_b, p.dgate_stride_h, p.dgate_stride_s,
                                    at);
  uint4 out_words[TURNS], gate_words[TURNS], dgated_words[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    if (const int token = gate_token(at, i); has_octet(p, token)) {
      out_words[i] = outs.load(token), gate_words[i] = gates.load(token);
      dgated_words[i] = dgated.load(token);
    }
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int token = gate_token(at, i);
    if (!has_octet(p, token))
      continue;
    float out[8], gate[8], gradient[8];
    unpack_octet(out, out_words[i]);
    unpack_octet(gate, gate_words[i]);
    unpack_octet(gradient, dgated_words[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const Shares of = shares_of(gate[c]);
      gradient[c] *= of.open;
      out[c] *= gradient[c] * of.shut;
    }
    douts.store(token, gradient);
    dgates.store(token, out);
  }
}
