//===- dp_start_test.cpp - What dP starts from, whole -----------------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// If dP and delta are alike and large, dS is what is left of both: a delta of 16 bits, two of its
/// three parts, leaves .004 of dS, one of 8 all of it.
class DpStart : public CaseTest {};
TEST_P(DpStart, IsOfMinusDeltaWhole) {
  const AttentionSpec& spec = attention->spec();
  const int64_t d = spec.head_dim;
  auto in = reference::random_inputs({1, 2, 1, 130, 300}, d, spec.dtype, 1, 17);
  for (float& x : in.v)
    x = reference::round_to(spec.dtype, x + 60);
  const auto got = run(*attention, in);
  Attention other(GetParam().spec, 0, family_tiles(GetParam().spec, Family::wgmma));
  const auto added = run(other, in);
  EXPECT_LE(distance(got.dk, added.dk).relative(), 1e-3);
  EXPECT_LE(distance(got.dq, added.dq).relative(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Gpu, DpStart,
                         testing::ValuesIn(cases_named({"D128_bf16_Row", "D64_fp16_Row",
                                                        "D64_bf16_Row_TopLeft"})),
                         case_name);

} // namespace
