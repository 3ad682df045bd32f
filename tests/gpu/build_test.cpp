//===- build_test.cpp - The kernels of this suite, compiled in parallel ----===//
//
// Runs first (the first file's tests do): the others then find their kernels in this process's
// store.
//
//===----------------------------------------------------------------------===//
#include "generator/operation.h"
#include "runtime/kernels.h"
#include "tests/gpu/cases.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class Build : public OnGpu {};

TEST_F(Build, CompilesTheKernelsOfEveryCase) {
  const driver::DeviceInfo info = driver::device_info(0);
  const Arch& arch = arch_for_capability(info.major, info.minor);
  std::vector<KernelSpec> kernels;
  for (const Case& c : all_cases()) {
    if (!runs_on(c, arch))
      continue;
    const ResolvedSpec spec = resolved(c.spec);
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const KernelSpec& kernel :
           Operation(spec, arch, c.tiles.value_or(Tiles{})).kernels(pass))
        if (std::find(kernels.begin(), kernels.end(), kernel) == kernels.end())
          kernels.push_back(kernel);
  }
  for (const auto& built : build_all(kernels))
    EXPECT_GT(built->threads, 0);
}

} // namespace
