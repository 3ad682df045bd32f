//===- many_launches_test.cpp - Thousands of launches, shapes changing --------===//
//
// Barriers, rings and turns that are nearly right hang or differ once in many launches. So each
// shape's results are held against those of its first launch, whatever was launched in between:
// bit for bit, but for sums of dQ that have no order.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <cstdlib>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// Counts the launches of a case. SAGEBWD_TEST_LAUNCHES asks for fewer, where they take longer.
int launches() {
  const char* asked = std::getenv("SAGEBWD_TEST_LAUNCHES");
  return asked ? std::stoi(asked) : 2500;
}

class ManyLaunches : public CaseTest {};

TEST_P(ManyLaunches, GiveTheSameWhateverTheShapesBefore) {
  constexpr int kShapes = 24;
  const AttentionSpec& spec = attention->spec();
  std::mt19937 random(GetParam().name.size());
  const auto drawn = [&](int least, int most) -> int64_t {
    return least + static_cast<int64_t>(random() % static_cast<uint32_t>(most - least + 1));
  };

  std::vector<reference::Inputs> inputs;
  std::vector<reference::Outputs<float>> first;
  for (int shape = 0; shape < kShapes; ++shape) {
    const int64_t heads_kv = drawn(1, 3), group = drawn(1, 2);
    const Problem problem{drawn(1, 2), heads_kv * group, heads_kv, drawn(1, 700), drawn(1, 700)};
    inputs.push_back(reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, shape));
    first.push_back(run(*attention, inputs.back()));
  }
  for (int launch = 0; launch < launches() && !HasFailure(); ++launch) {
    const int64_t shape = drawn(0, kShapes - 1);
    SCOPED_TRACE("launch " + std::to_string(launch) + " of shape " + std::to_string(shape));
    auto got = run(*attention, inputs[shape], {{}, nullptr, std::nullopt, std::nullopt});
    if (!spec.deterministic) {
      const Distance off = distance(got.dq, first[shape].dq);
      EXPECT_LE(off.error, 1e-3 * std::max(off.norm, 1e-2)); // one key's dQ is nothing but rounding
      got.dq = first[shape].dq;
    }
    expect_identical(got, first[shape]);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, ManyLaunches,
    testing::ValuesIn(cases_named({"D128_bf16_Row", "D64_bf16_Row_TopLeft", "FusedWs_D64_bf16",
                                   "D256_bf16_Row", "D256_bf16_Gradients16_TopLeft",
                                   "D512_bf16_Row", "FusedWs_D128_fp16_TopLeft"})),
    case_name);

} // namespace
