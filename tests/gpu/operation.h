//===- operation.h - Forward and backward on host data ---------------------===//
#pragma once

#include "tests/gpu/device.h"
#include "tools/distance.h"

namespace sagebwd::test {

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

inline void expect_identical(const reference::Outputs<float>& a,
                             const reference::Outputs<float>& b) {
  EXPECT_EQ(a.o, b.o);
  EXPECT_EQ(a.lse, b.lse);
  EXPECT_EQ(a.dq, b.dq);
  EXPECT_EQ(a.dk, b.dk);
  EXPECT_EQ(a.dv, b.dv);
}

} // namespace sagebwd::test
