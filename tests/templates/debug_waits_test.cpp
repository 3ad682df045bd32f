//===- debug_waits_test.cpp - Kernels whose waits have a bound compile ------===//
//
// Kernels that found_sound.txt lists are not compiled again, except one.
//
//===----------------------------------------------------------------------===//

#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/generate.h"
#include "tests/templates/found_sound.h"
#include "tests/templates/nvrtc_fixture.h"

using namespace sagebwd;

namespace {

class DebugWaitsTest : public test::WithNvrtc {};

void expect_bound(const KernelSource& source, bool bounded) {
  const std::string ptx =
      test::compile(source.name, source.text, "sm_90a", /*want_ptx=*/true, source.options).ptx;
  EXPECT_EQ(ptx.find("__assertfail") != std::string::npos, bounded) << source.name;
}

TEST_F(DebugWaitsTest, NameWhatTheyAreFor) {
  const Arch& arch = find_arch("sm_90a");
  std::vector<KernelSource> plain_ones, bounded_ones;
  test::FoundSound found_sound;
  found_sound.add_file("tests/templates/debug_waits_test.cpp");
  for (int head_dim : {128, 256})
    for (Precision precision : {Precision::six_of_seven, Precision::gradients16}) {
      AttentionSpec spec;
      spec.head_dim = head_dim, spec.precision = precision, spec.deterministic = head_dim == 256;
      for (Pass pass : {Pass::forward, Pass::backward})
        for (const KernelSpec& kernel : Operation(resolved(spec), arch).kernels(pass)) {
          const KernelSource plain = emit(kernel), source = with_bounded_waits(plain);
          if (kernel.tile.family.roles() == Roles::alike) {
            EXPECT_EQ(source.text, plain.text) << plain.name;
            continue;
          }
          plain_ones.push_back(plain), bounded_ones.push_back(source);
          found_sound.add(plain);
          found_sound.add(source);
        }
    }
  ASSERT_GE(bounded_ones.size(), 8u); // forwards, split and fused backwards, pairs
  if (found_sound.is_listed())
    return expect_bound(bounded_ones.front(), true);
  for (const KernelSource& source : plain_ones)
    expect_bound(source, false);
  for (const KernelSource& source : bounded_ones)
    expect_bound(source, true);
  if (!HasFailure())
    found_sound.passed();
}

} // namespace
