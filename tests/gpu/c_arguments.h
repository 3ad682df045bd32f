//===- c_arguments.h - Arguments of the C++ operation, for C ----------------===//
#pragma once

#include "c/sagebwd.h"
#include "runtime/front_end.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace sagebwd::test {

inline sagebwd_problem for_c(const Problem& p) {
  return {p.batch, p.heads, p.heads_kv, p.seq_q, p.seq_kv};
}
inline sagebwd_tensor for_c(const Tensor& t) {
  return {t.data, t.stride_b, t.stride_h, t.stride_s};
}
inline sagebwd_packing for_c(const Packing& p) {
  return {p.first_queries, p.first_keys, p.lengths_q, p.lengths_kv, p.apart};
}
inline sagebwd_lists for_c(const Lists& l) { return {l.row_bits, l.stride_b, l.stride_h}; }
inline sagebwd_intervals for_c(const Intervals& i) { return {i.numbers, i.stride_b, i.stride_h}; }
inline sagebwd_shares for_c(const Shares& s) {
  return {s.alpha, s.stride_b, s.stride_h, s.stride_s, s.tokens, s.of_rest, s.keeps_sums};
}
inline sagebwd_forward_args for_c(const ForwardArgs& a) {
  return {.struct_size = sizeof(sagebwd_forward_args),
          .problem = for_c(a.problem),
          .q = for_c(a.q),
          .k = for_c(a.k),
          .v = for_c(a.v),
          .out = for_c(a.out),
          .lse = a.lse,
          .packing = for_c(a.packing),
          .value_dim = a.value_dim,
          .k_mean = a.k_mean,
          .lists = for_c(a.lists),
          .shares = for_c(a.shares),
          .sparse_out = for_c(a.sparse_out),
          .kept_sums = a.kept_sums,
          .intervals = for_c(a.intervals)};
}
inline sagebwd_backward_args for_c(const BackwardArgs& a) {
  return {.struct_size = sizeof(sagebwd_backward_args),
          .problem = for_c(a.problem),
          .q = for_c(a.q),
          .k = for_c(a.k),
          .v = for_c(a.v),
          .out = for_c(a.out),
          .dout = for_c(a.dout),
          .lse = a.lse,
          .dlse = a.dlse,
          .dq = for_c(a.dq),
          .dk = for_c(a.dk),
          .dv = for_c(a.dv),
          .packing = for_c(a.packing),
          .value_dim = a.value_dim,
          .k_mean = a.k_mean,
          .lists = for_c(a.lists),
          .shares = for_c(a.shares),
          .dalpha = a.dalpha,
          .kept_sums = a.kept_sums,
          .intervals = for_c(a.intervals)};
}

inline sagebwd_gate_args for_c(const GateCall& a) {
  return {sizeof(sagebwd_gate_args), for_c(a.problem), for_c(a.out), for_c(a.gate), for_c(a.gated)};
}
inline sagebwd_front_side for_c(const FrontSide& s) {
  return {.x = for_c(s.x),
          .y = for_c(s.y),
          .normed = s.normed,
          .gain_per_head = s.gain_per_head,
          .gain = s.gain,
          .inv_rms = s.inv_rms,
          .inv_rms_per_head = s.inv_rms_per_head,
          .rope = {s.rope.cos, s.rope.sin, s.rope.stride_b, s.rope.stride_s}};
}
inline sagebwd_front_args for_c(const FrontCall& a) {
  return {.struct_size = sizeof(sagebwd_front_args),
          .problem = for_c(a.problem),
          .q = for_c(a.q),
          .k = for_c(a.k),
          .norm_eps = a.norm_eps,
          .rope_begin = a.rope_begin,
          .rope_channels = a.rope_channels,
          .rope_interleaved = a.rope_interleaved};
}
/// `of`: of a.of.
inline sagebwd_front_gradients_args for_c(const FrontGradientsCall& a,
                                          const sagebwd_front_args& of) {
  const auto side = [](const FrontSideGradients& s) {
    return sagebwd_front_gradients_side{for_c(s.dx), s.dgain, s.gain_parts, s.dinv_rms};
  };
  return {.struct_size = sizeof(sagebwd_front_gradients_args),
          .of = &of,
          .q = side(a.q),
          .k = side(a.k)};
}

/// Expects that status and a message with all of `parts`.
inline void expect_failed(sagebwd_status found, sagebwd_status expected,
                          const std::vector<std::string>& parts) {
  SCOPED_TRACE(parts.front());
  EXPECT_EQ(found, expected) << sagebwd_last_error();
  for (const std::string& part : parts)
    EXPECT_NE(std::string(sagebwd_last_error()).find(part), std::string::npos)
        << sagebwd_last_error();
}

/// Equal where what was not written, which is NaN, is the same too.
inline std::vector<uint32_t> bits_of(const std::vector<float>& x) {
  std::vector<uint32_t> bits(x.size());
  std::memcpy(bits.data(), x.data(), x.size() * sizeof(float));
  return bits;
}

} // namespace sagebwd::test
