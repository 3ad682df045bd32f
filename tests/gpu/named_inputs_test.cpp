//===- named_inputs_test.cpp - Inputs as trained models have them ---------===//
#include "runtime/reference/named_inputs.h"
#include "tests/gpu/operation.h"

#include <algorithm>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// Against FP64 beyond what the emulation costs, as `sagebwd verify` has it.
constexpr double kSlack = 4e-3;

struct NamedCase {
  reference::Distribution inputs;
  Precision precision;
};

class NamedInputs : public OnGpu, public testing::WithParamInterface<NamedCase> {};

TEST_P(NamedInputs, NearTheEmulation) {
  AttentionSpec spec;
  spec.causal = reference::facts_of(GetParam().inputs).mask;
  spec.precision = GetParam().precision;
  Attention attention(spec, 0);
  const auto in = reference::named_inputs({GetParam().inputs}, {1, 2, 2, 1024, 1024}, spec.head_dim,
                                          spec.dtype, 3);
  const auto got = run(attention, in);
  const auto emulated = emulate_like(attention.spec(), in, got);
  const auto exact = reference::exact(in, attention.spec());
  const auto expect_near = [](const char* name, const std::vector<float>& x,
                              const std::vector<float>& cpu, const std::vector<double>& fp64) {
    EXPECT_LE(distance(x, cpu).relative(), kEmulationLimit) << name << " against the emulation";
    EXPECT_LE(distance(x, fp64).relative(), distance(cpu, fp64).relative() + kSlack)
        << name << " against FP64";
  };
  expect_near("out", got.o, emulated.o, exact.o);
  expect_near("lse", got.lse, emulated.lse, exact.lse);
  expect_near("dq", got.dq, emulated.dq, exact.dq);
  expect_near("dk", got.dk, emulated.dk, exact.dk);
  expect_near("dv", got.dv, emulated.dv, exact.dv);
}

/// All inputs under every plan.
std::vector<NamedCase> named_cases() {
  std::vector<NamedCase> cases;
  for (const auto& [inputs, name] : Words<reference::Distribution>::all)
    for (const auto& [precision, word] : Words<Precision>::all)
      cases.push_back({inputs, precision});
  return cases;
}

std::string name_of(const testing::TestParamInfo<NamedCase>& info) {
  std::string name = std::string(to_string(info.param.inputs)) + "_" +
                     std::string(to_string(info.param.precision));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Gpu, NamedInputs, testing::ValuesIn(named_cases()), name_of);

} // namespace
