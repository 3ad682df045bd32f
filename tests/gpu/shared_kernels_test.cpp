//===- shared_kernels_test.cpp - Operations that have kernels in common -----===//
#include "generator/operation.h"
#include "tests/gpu/operation.h"

#include <algorithm>
#include <chrono>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// The size of a window is an argument of its kernels: a program whose windows keep changing has
/// one set of them, and the first call of a further size waits for nothing.
TEST_F(OnGpu, WindowsOfAllSizesHaveOneSetOfKernels) {
  constexpr int kWindows = 150;
  const reference::Inputs in =
      reference::random_inputs({1, 1, 1, 64, 64}, 64, DType::bf16, 1.0, /*seed=*/1);
  const Problem& problem = in.problem;
  size_t after_first = 0;
  std::vector<double> first_calls_ms;
  for (int window = 1; window <= kWindows; ++window) {
    AttentionSpec spec;
    spec.head_dim = 64, spec.causal = Causal::top_left, spec.window_left = window;
    const auto start = std::chrono::steady_clock::now();
    Attention attention(spec);
    for (KernelKind kind : Operation(resolved(spec), attention.arch()).tunable_kernels())
      attention.tile(kind, problem);
    attention.warmup(/*backward=*/true, problem);
    first_calls_ms.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
    if (window == 1 || window == kWindows)
      run(attention, in);
    if (window == 1)
      after_first = driver::loaded_modules();
  }
  EXPECT_GT(after_first, 0u);
  EXPECT_EQ(driver::loaded_modules(), after_first);
  std::sort(first_calls_ms.begin(), first_calls_ms.end());
  std::printf("what a call of a further window waits for: %.3f ms (median)\n",
              first_calls_ms[kWindows / 2]);
}

} // namespace
