//===- gate_test.cpp - Gates of outputs, through C++ and C -------------------===//
#include "tests/gpu/c_arguments.h"
#include "tests/gpu/device.h"

#include <cmath>
#include <functional>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Parts = std::vector<std::string>;
using Bits = std::vector<std::vector<uint32_t>>;

struct GateCase {
  int head_dim;
  DType dtype;
  Problem problem;
};
std::ostream& operator<<(std::ostream& out, const GateCase& c) {
  return out << "D" << c.head_dim << "_" << to_string(c.dtype) << "_M" << c.problem.seq_q;
}

class Gate : public OnGpu, public testing::WithParamInterface<GateCase> {
protected:
  std::vector<float> drawn(unsigned seed, float scale) const {
    const Problem& p = GetParam().problem;
    std::mt19937 draw(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(
        static_cast<size_t>(p.batch * p.heads * p.seq_q * GetParam().head_dim));
    for (float& x : values)
      x = reference::round_to(GetParam().dtype, normal(draw));
    return values;
  }
  DeviceTensor tensor(Layout layout) const {
    const Problem& p = GetParam().problem;
    return DeviceTensor(GetParam().dtype, p.batch, p.heads, p.seq_q, GetParam().head_dim, layout,
                        kPoison);
  }
  /// gated, dout and dgate, by either door.
  std::vector<std::vector<float>> results(bool by_c) const {
    const DeviceTensor out = tensor({true, 8}), gate_tensor = tensor({false, 0}),
                       gated = tensor({true, 0}), dgated = tensor({false, 16}),
                       dout = tensor({true, 8}), dgate = tensor({true, 0});
    const_cast<DeviceTensor&>(out).upload(drawn(1, 1));
    const_cast<DeviceTensor&>(gate_tensor).upload(drawn(2, 5));
    const_cast<DeviceTensor&>(dgated).upload(drawn(3, 1));
    const Problem& problem = GetParam().problem;
    const GateCall forward{problem, out.view(), gate_tensor.view(), gated.view()};
    const GateGradientsCall backward{
        {problem, out.view(), gate_tensor.view(), dgated.view()}, dout.view(), dgate.view()};
    const AttentionSpec spec{.head_dim = GetParam().head_dim, .dtype = GetParam().dtype};
    driver::synchronize();
    if (by_c) {
      const std::string text =
          "d" + std::to_string(spec.head_dim) + " " + std::string(to_string(spec.dtype));
      sagebwd_operation* c = nullptr;
      EXPECT_EQ(sagebwd_create(text.c_str(), 0, &c), SAGEBWD_OK) << sagebwd_last_error();
      const sagebwd_gate_args args = for_c(forward), of = for_c(backward.of);
      const sagebwd_gate_gradients_args gradients{sizeof(gradients), &of, for_c(backward.dout),
                                                  for_c(backward.dgate)};
      EXPECT_EQ(sagebwd_gate(c, &args, nullptr), SAGEBWD_OK) << sagebwd_last_error();
      EXPECT_EQ(sagebwd_gate_gradients(c, &gradients, nullptr), SAGEBWD_OK) << sagebwd_last_error();
      sagebwd_destroy(c);
    } else {
      const Attention attention(spec, 0);
      gate(forward, attention);
      gate_gradients(backward, attention);
    }
    driver::synchronize();
    Faults faults;
    std::vector<std::vector<float>> found = {gated.download("gated", faults),
                                             dout.download("dout", faults),
                                             dgate.download("dgate", faults)};
    EXPECT_EQ(faults, Faults()) << "what lies between the vectors was written";
    return found;
  }
};

/// Each number is that of FP64, rounded once; FP32 has no digits below 2^-24.
TEST_P(Gate, RoundsOnce) {
  const std::vector<float> out = drawn(1, 1), gates = drawn(2, 5), dgated = drawn(3, 1);
  const auto found = results(/*by_c=*/false);
  const double last = (GetParam().dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) * 1.01;
  const auto near = [&](float x, double right) {
    return std::abs(x - right) <= last * std::abs(right) + 0x1p-24;
  };
  for (size_t i = 0; i < out.size(); ++i) {
    const double share = 1 / (1 + std::exp(-double(gates[i]))),
                 rest = 1 / (1 + std::exp(double(gates[i])));
    ASSERT_TRUE(near(found[0][i], out[i] * share)) << i << " gate " << gates[i];
    ASSERT_TRUE(near(found[1][i], dgated[i] * share)) << i << " gate " << gates[i];
    ASSERT_TRUE(near(found[2][i], double(dgated[i]) * out[i] * share * rest))
        << i << " gate " << gates[i];
  }
}
TEST_P(Gate, GivesTheSameBitsInC) { EXPECT_EQ(results(/*by_c=*/true), results(/*by_c=*/false)); }

INSTANTIATE_TEST_SUITE_P(Gpu, Gate,
                         testing::Values(GateCase{64, DType::bf16, {2, 3, 3, 130, 130}},
                                         GateCase{128, DType::fp16, {1, 2, 1, 67, 40}},
                                         GateCase{72, DType::fp16, {1, 2, 2, 1, 1}},
                                         GateCase{256, DType::bf16, {1, 1, 1, 33, 33}}),
                         [](const auto& info) { return testing::PrintToString(info.param); });

/// Addresses that nothing reads: these calls launch nothing.
class CGate : public OnGpu {};
TEST_F(CGate, RefusalsAreStatusesWithMessages) {
  const auto tensor = [](uint64_t address) {
    return sagebwd_tensor{reinterpret_cast<void*>(address), 16384, 8192, 64};
  };
  sagebwd_operation *c = nullptr, *packed = nullptr;
  ASSERT_EQ(sagebwd_create("d64", 0, &c), SAGEBWD_OK) << sagebwd_last_error();
  ASSERT_EQ(sagebwd_create("d64 packed", 0, &packed), SAGEBWD_OK) << sagebwd_last_error();
  const sagebwd_gate_args good{
      sizeof(good), {1, 2, 2, 128, 128}, tensor(0x100000), tensor(0x200000), tensor(0x300000)};
  const auto refused = [&](const Parts& parts,
                           const std::function<void(sagebwd_gate_args&)>& change) {
    sagebwd_gate_args args = good;
    change(args);
    expect_failed(sagebwd_gate(c, &args, nullptr), SAGEBWD_INVALID, parts);
  };
  refused({"gate: the address is null"}, [](auto& a) { a.gate.data = nullptr; });
  refused({"out: the token stride is 68"}, [](auto& a) { a.out.stride_s = 68; });
  refused({"gated: the address is not a multiple of 16"},
          [&](auto& a) { a.gated = tensor(0x300008); });
  refused({"share memory"}, [](auto& a) { a.gated = a.out; });
  refused({"heads = 3"}, [](auto& a) { a.problem.heads = 3; });
  refused({"args->struct_size = 8 "}, [](auto& a) { a.struct_size = 8; });
  expect_failed(sagebwd_gate(c, nullptr, nullptr), SAGEBWD_INVALID, {"args is null"});
  expect_failed(sagebwd_gate(nullptr, &good, nullptr), SAGEBWD_INVALID, {"operation is null"});
  expect_failed(sagebwd_gate(packed, &good, nullptr), SAGEBWD_INVALID, {"of packed sequences"});

  sagebwd_gate_gradients_args gradients{sizeof(gradients), &good, tensor(0x400000),
                                        tensor(0x500000)};
  gradients.dgate = gradients.dout;
  expect_failed(sagebwd_gate_gradients(c, &gradients, nullptr), SAGEBWD_INVALID, {"share memory"});
  gradients.of = nullptr;
  expect_failed(sagebwd_gate_gradients(c, &gradients, nullptr), SAGEBWD_INVALID,
                {"args->of is null"});
  sagebwd_destroy(c), sagebwd_destroy(packed);
}

} // namespace
