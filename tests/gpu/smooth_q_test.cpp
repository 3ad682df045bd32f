//===- smooth_q_test.cpp - Units of one query, which smoothing makes zeros --===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// Nothing of such a unit is quantised: dK is all of its mean, and must not be lost beside what
/// sums of integers are too large by, nor lose what was summed before.
class SmoothQ : public OnGpu, public testing::WithParamInterface<Case> {};

TEST_P(SmoothQ, DkOfUnitsOfOneQueryIsTheirMeans) {
  AttentionSpec spec = GetParam().spec;
  spec.dtype = DType::bf16; // which has small numbers too
  Attention attention(spec, 0);
  const int unit = channel_tokens_q(*resolved(spec));
  for (int64_t queries : {1, unit + 1, 2 * unit + 1}) {
    SCOPED_TRACE(std::to_string(queries) + " queries");
    auto in = reference::random_inputs({1, 2, 1, queries, 193}, spec.head_dim, spec.dtype, 1, 3);
    for (auto* tensor : {&in.q, &in.k, &in.dout})
      for (float& x : *tensor)
        x = reference::round_to(spec.dtype, x / 16);
    const auto got = run(attention, in);
    const auto exact = reference::exact(in, attention.spec());
    const auto emulated = emulate_like(attention.spec(), in, got);
    const double error = distance(got.dk, exact.dk).relative();
    EXPECT_LE(error, 1.3 * distance(emulated.dk, exact.dk).relative() + 0.001);
    EXPECT_LE(distance(got.dk, emulated.dk).relative(), queries == 1 ? 0.003 : 0.01);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, SmoothQ,
                         testing::ValuesIn(cases_named({"SmoothQ_D64_bf16_Row_TopLeft",
                                                        "SmoothQ_D128_bf16_Block_BottomRight",
                                                        "SmoothQ_D256_bf16_Row"})),
                         case_name);

} // namespace
