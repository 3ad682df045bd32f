//===- pre_pass_run.h - A call whose pre-passes are checked ----------------===//
#pragma once

#include "generator/spec.h"
#include "runtime/reference/reference.h"

#include <cmath>
#include <cstddef>
#include <vector>

namespace sagebwd::test {

/// A call's tensors, and its workspace behind the pre-passes.
struct PrePassRun {
  Pass pass;
  ResolvedSpec spec;
  reference::Inputs in; ///< softmax_scale set; dlse may be empty
  std::vector<float> out, lse;
  std::vector<std::byte> workspace;
};

/// Returns inputs whose rows and channels differ in size, some of them zeros. out and lse are not
/// the results of attention to these inputs.
inline PrePassRun pre_pass_run(Pass pass, const AttentionSpec& spec, const Problem& p) {
  PrePassRun run{pass, resolved(spec), {}, {}, {}, {}};
  reference::Inputs& in = run.in;
  const DType dtype = spec.dtype;
  in = reference::random_inputs(p, spec.head_dim, dtype, 1, 11);
  in.softmax_scale = 1 / std::sqrt(static_cast<float>(spec.head_dim));
  const int64_t d = spec.head_dim;
  run.out = reference::random_inputs(p, spec.head_dim, dtype, 0.5, 12).q;
  for (std::vector<float>* tensor : {&in.q, &in.k, &in.v, &in.dout})
    for (size_t i = 0; i < tensor->size(); ++i) {
      const int64_t token = static_cast<int64_t>(i) / d, channel = static_cast<int64_t>(i) % d;
      float& x = (*tensor)[i];
      if (tensor == &in.dout)
        x = std::ldexp(x, static_cast<int>(token * 7 % 13) - 8);
      if (channel % 16 == 3)
        x = x * 4 + (tensor == &in.k ? 2 : 0);
      if (token % 67 == 5 || channel == 17 ||
          token / channel_tokens_q(run.spec) == 1 && channel == 20)
        x = 0;
      x = reference::round_to(dtype, x);
    }
  run.lse.resize(p.batch * p.heads * p.seq_q);
  in.dlse.resize(run.lse.size());
  for (size_t i = 0; i < run.lse.size(); ++i) {
    run.lse[i] = i % 31 == 2 ? -INFINITY : 3 + std::sin(static_cast<float>(i));
    in.dlse[i] = std::cos(static_cast<float>(i) * 1.3f);
  }
  return run;
}

} // namespace sagebwd::test
