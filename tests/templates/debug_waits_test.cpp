//===- debug_waits_test.cpp - Kernels whose waits have a bound compile ------===//

#include "generator/space.h"
#include "runtime/generate.h"
#include "tests/templates/nvrtc_fixture.h"

using namespace sagebwd;

namespace {

class DebugWaitsTest : public test::WithNvrtc {};

TEST_F(DebugWaitsTest, NameWhatTheyAreFor) {
  const Arch& arch = find_arch("sm_90a");
  int bounded = 0;
  for (int head_dim : {128, 256})
    for (Precision precision : {Precision::six_of_seven, Precision::gradients16}) {
      AttentionSpec spec;
      spec.head_dim = head_dim, spec.precision = precision, spec.deterministic = head_dim == 256;
      for (Pass pass : {Pass::forward, Pass::backward})
        for (const KernelSpec& kernel : kernels_of(pass, resolved(spec), arch)) {
          const KernelSource plain = emit(kernel), source = with_bounded_waits(plain);
          if (!warp_specialised(kernel.tile.family)) {
            EXPECT_EQ(source.text, plain.text) << plain.name;
            continue;
          }
          const test::Compiled compilation = test::compile(
              source.name, source.text, kernel.arch.name, /*want_ptx=*/true, source.options);
          EXPECT_NE(compilation.ptx.find("__assertfail"), std::string::npos) << source.name;
          EXPECT_EQ(test::compile(kernel, true).ptx.find("__assertfail"), std::string::npos);
          ++bounded;
        }
    }
  EXPECT_GE(bounded, 8); // forwards, split and fused backwards, pairs
}

} // namespace
