//===- value_dim_test.cpp - V with fewer channels than Q and K ------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

constexpr int kValueDim = 32;

/// The first channels of each token.
std::vector<float> cut(const std::vector<float>& x, int channels) {
  std::vector<float> found;
  for (size_t first = 0; first < x.size(); first += static_cast<size_t>(channels))
    found.insert(found.end(), x.begin() + static_cast<std::ptrdiff_t>(first),
                 x.begin() + static_cast<std::ptrdiff_t>(first) + kValueDim);
  return found;
}

class ValueDim : public CaseTest {};

TEST_P(ValueDim, IsAsIfTheOthersWereZeros) {
  const AttentionSpec& spec = attention->spec();
  auto in = reference::random_inputs({2, 4, 2, 150, 200}, spec.head_dim, spec.dtype, 1, 5);
  in.dlse.assign(2 * 4 * 150, 0.5f);
  for (auto* x : {&in.v, &in.dout})
    for (size_t i = 0; i < x->size(); ++i)
      if (i % static_cast<size_t>(spec.head_dim) >= kValueDim)
        (*x)[i] = 0;
  auto expected = run(*attention, in);
  for (auto* x : {&in.v, &in.dout, &expected.o, &expected.dv})
    *x = cut(*x, spec.head_dim);
  for (const Layout& layout : {Layout{}, Layout{.bshd = true, .padding = 24}}) {
    const auto got = run(*attention, in, {.layout = layout, .value_dim = kValueDim});
    if (!spec.deterministic) {
      EXPECT_LE(distance(got.dq, expected.dq).relative(), 1e-3);
      expected.dq = got.dq;
    }
    expect_identical(got, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, ValueDim,
    testing::ValuesIn(cases_named(
        {"D40_bf16_Row_TopLeft", "D72_fp16_Dv16_Unsmoothed", "HalfDp_D72_bf16_Dv16_TopLeft",
         "D112_bf16_Gradients16_TopLeft", "D160_bf16_Row", "Mma_D80_bf16_Row_TopLeft",
         "FusedWs_D72_fp16_TopLeft", "Wgmma_D112_bf16_Row_TopLeft", "Window_D80_bf16_TopLeft"})),
    case_name);

} // namespace
