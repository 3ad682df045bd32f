//===- operation.h - Forward and backward on host data ---------------------===//
#pragma once

#include "tests/gpu/device.h"

#include <cmath>

namespace sagebwd::test {

struct RunOptions {
  Layout layout;
  driver::Stream stream = nullptr;
  uint8_t workspace_start = kPoison;
};

/// All memory of one forward and backward call; inputs are uploaded.
struct Operands {
  Operands(const Attention& attention, const reference::Inputs& in, const RunOptions& options = {})
      : problem(in.problem), dtype(attention.spec().dtype), channels(in.head_dim),
        layout(options.layout),
        forward_workspace(attention.forward_workspace_bytes(problem), options.workspace_start),
        backward_workspace(attention.backward_workspace_bytes(problem), options.workspace_start) {
    q.upload(in.q);
    k.upload(in.k);
    v.upload(in.v);
    dout.upload(in.dout);
    if (!in.dlse.empty())
      dlse.upload(in.dlse);
    forward = {problem,
               q.view(),
               k.view(),
               v.view(),
               out.view(),
               lse.as<float>(),
               0,
               forward_workspace.as(),
               forward_workspace.bytes(),
               options.stream};
    backward = {problem,
                q.view(),
                k.view(),
                v.view(),
                out.view(),
                dout.view(),
                lse.as<float>(),
                in.dlse.empty() ? nullptr : dlse.as<float>(),
                dq.view(),
                dk.view(),
                dv.view(),
                0,
                backward_workspace.as(),
                backward_workspace.bytes(),
                options.stream};
    forward.softmax_scale = backward.softmax_scale =
        in.softmax_scale != 0 ? in.softmax_scale : 1 / std::sqrt(static_cast<float>(channels));
    // The copies and fills ran on the null stream, which other streams do not wait for.
    driver::synchronize();
  }

  DeviceTensor queries() const {
    return DeviceTensor(dtype, problem.batch, problem.heads, problem.seq_q, channels, layout);
  }
  DeviceTensor keys() const {
    return DeviceTensor(dtype, problem.batch, problem.heads_kv, problem.seq_kv, channels, layout);
  }
  size_t rows_bytes() const { return 4 * problem.batch * problem.heads * problem.seq_q; }

  Problem problem;
  DType dtype;
  int channels;
  Layout layout;
  DeviceTensor q = queries(), k = keys(), v = keys(), dout = queries();
  DeviceTensor out = queries(), dq = queries(), dk = keys(), dv = keys();
  Buffer lse{rows_bytes()}, dlse{rows_bytes()};
  Buffer forward_workspace, backward_workspace;
  ForwardArgs forward;
  BackwardArgs backward;
};

/// Runs both passes; fails where an output is not wholly written, or anything around it is.
inline reference::Outputs<float> run(Attention& attention, const reference::Inputs& in,
                                     const RunOptions& options = {}) {
  Operands operands(attention, in, options);
  attention.forward(operands.forward);
  attention.backward(operands.backward);
  driver::synchronize();

  reference::Outputs<float> result;
  result.o = operands.out.download_checked("out");
  result.dq = operands.dq.download_checked("dq");
  result.dk = operands.dk.download_checked("dk");
  result.dv = operands.dv.download_checked("dv");
  result.lse = operands.lse.download<float>();
  const std::vector<uint32_t> lse_bits = operands.lse.download<uint32_t>();
  EXPECT_EQ(std::count(lse_bits.begin(), lse_bits.end(), 0xffffffffu), 0)
      << "elements of lse were not written";
  operands.lse.expect_guards_untouched("lse");
  operands.forward_workspace.expect_guards_untouched("the forward workspace");
  operands.backward_workspace.expect_guards_untouched("the backward workspace");
  return result;
}

/// Emulated outputs: the forward's own, and a backward that starts from the run's out and lse.
inline reference::Outputs<float> emulate_like(const Attention& attention,
                                              const reference::Inputs& in,
                                              const reference::Outputs<float>& run) {
  const reference::ProductPlan plan = reference::plan_of(attention.spec().precision);
  reference::Inputs forward_only = in;
  forward_only.dout.clear();
  forward_only.dlse.clear();
  const auto forward = reference::emulate(forward_only, attention.spec(), plan, false, true);
  auto result = reference::emulate(in, attention.spec(), plan, false, true, &run.o, &run.lse);
  result.o = forward.o;
  result.lse = forward.lse;
  return result;
}

/// ||x - reference||, and ||reference||.
struct Distance {
  double error = 0, norm = 0, largest_error = 0;
  double relative() const { return norm > 0 ? error / norm : error; }
};
template <typename T> Distance distance(const std::vector<float>& x, const std::vector<T>& y) {
  EXPECT_EQ(x.size(), y.size());
  Distance d;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    if (y[i] == -INFINITY && x[i] == -INFINITY) // lse of a row that sees no key
      continue;
    const double error = static_cast<double>(x[i]) - y[i];
    d.error += error * error;
    d.norm += static_cast<double>(y[i]) * y[i];
    // A NaN stays: nothing compares greater.
    if (std::isnan(error) || std::abs(error) > d.largest_error)
      d.largest_error = std::abs(error);
  }
  d.error = std::sqrt(d.error);
  d.norm = std::sqrt(d.norm);
  return d;
}

inline void expect_identical(const reference::Outputs<float>& a,
                             const reference::Outputs<float>& b) {
  EXPECT_EQ(a.o, b.o);
  EXPECT_EQ(a.lse, b.lse);
  EXPECT_EQ(a.dq, b.dq);
  EXPECT_EQ(a.dk, b.dk);
  EXPECT_EQ(a.dv, b.dv);
}

} // namespace sagebwd::test
