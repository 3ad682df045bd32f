//===- operation.h - Forward and backward on host data ---------------------===//
#pragma once

#include "tests/gpu/device.h"
#include "tools/distance.h"

namespace sagebwd::test {

/// Relative L2 of outputs to the emulation given the same out and lse: FP32 sums in another order
/// flip the rounding of an integer here and there, no more. Moving lse of 512 tokens by at most its
/// last place moves emulated gradients by 2.0e-4; recorded of kernels are up to 1.1e-3
/// (errors.json).
inline constexpr double kEmulationLimit = 3e-3;
/// Under `block` a flipped integer stands for more: one scale serves a whole tile. In the same two
/// ways 3.4e-4 and 7.2e-4; what made 3e-3 too few for 512 tokens on a GPU is not recorded.
inline constexpr double kBlockEmulationLimit = 5e-3;

using tools::Distance, tools::distance, tools::longest_token, tools::norm;

/// Runs both passes; fails where an output is not wholly written, or anything around it is.
inline reference::Outputs<float> run(Attention& attention, const reference::Inputs& in,
                                     const RunOptions& options = {}) {
  Faults faults;
  auto outputs = run_on_gpu(attention, 0, in, options, &faults);
  for (const std::string& fault : faults)
    ADD_FAILURE() << fault;
  return outputs;
}

/// Gives what passes left there; fails as run() does.
inline reference::Outputs<float> downloaded(const Operands& operands) {
  Faults faults;
  auto outputs = operands.download(faults);
  for (const std::string& fault : faults)
    ADD_FAILURE() << fault;
  return outputs;
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
