//===- dp_sums_test.cpp - dP with sums in FP16 -----------------------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <algorithm>
#include <cmath>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// A backward behind a forward whose out and lse are not its own: zeros.
reference::Outputs<float> run_with_zeros(Attention& attention, const reference::Inputs& in) {
  driver::DeviceScope scope(0);
  Operands operands(attention, in);
  attention.forward(operands.forward);
  driver::synchronize();
  operands.out.upload(std::vector<float>(in.q.size(), 0.0f));
  operands.lse.upload(std::vector<float>(in.q.size() / in.head_dim, 0.0f));
  driver::synchronize();
  attention.backward(operands.backward);
  driver::synchronize();
  return downloaded(operands);
}

/// Kernels that keep the bits of dP: where scores and lse are 0, P is 1, so that dS is dP - delta,
/// which 16 bits have whole if V has no mean.
Case bare(const char* name, int head_dim, DType dtype, Causal causal, const char* fused = nullptr) {
  Case c{name, {head_dim, dtype, causal, Granularity::row, Precision::gradients16, false}, {}};
  c.spec.sink_keys = 0;
  c.spec.dp_sums = DpSums::fp16;
  c.spec.deterministic = !fused;
  c.tiles = mma_tiles(c.spec);
  if (fused)
    (*c.tiles)[KernelKind::backward] = parse_tile(fused);
  return c;
}

class BitsOfHalfDp : public CaseTest {
protected:
  /// Zeros, and an identity in as many tokens as there are channels, or fewer.
  std::vector<float> identity(int64_t heads, int64_t tokens, int64_t every) const {
    const int64_t d = attention->spec()->head_dim, first = std::clamp<int64_t>(tokens - d, 0, 64);
    std::vector<float> x(heads * tokens * d, 0.0f);
    for (int64_t head = 0; head < heads; head += every)
      for (int64_t i = first; i < std::min(tokens, first + d); ++i)
        x[(head * tokens + i) * d + i - first] = 1;
    return x;
  }
};

/// The emulation rounds a sum of 16 products once. On an H200 all sums of bf16 values had its bits,
/// and few sums of FP16 values had others. The reason was not found; tensor cores may drop the last
/// bits of products that are much smaller than others in a sum.
void expect_bits(const std::vector<float>& got, const std::vector<float>& emulated, DType dtype) {
  if (dtype == DType::bf16)
    EXPECT_EQ(got, emulated);
  ASSERT_EQ(got.size(), emulated.size());
  size_t differ = 0;
  for (size_t i = 0; i < got.size(); ++i)
    differ += got[i] != emulated[i];
  EXPECT_LE(differ, got.size() / 1000);
  EXPECT_LE(distance(got, emulated).relative(), 2e-5);
}

/// dQ of keys that are an identity is dS, and so is dK of such queries.
TEST_P(BitsOfHalfDp, AreTheEmulations) {
  const AttentionSpec& spec = attention->spec();
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{130, 200}, {65, 33}, {40, 90}}) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    const Problem problem{1, 2, 1, m, n};
    const int64_t d = spec.head_dim;
    auto in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 23);
    in.softmax_scale = 1.0f;
    for (int64_t i = 0; i < n * d; ++i) { // the last token's is minus the first's
      const int64_t token = i / d, other = n - 1 - token;
      float& x = in.v[i];
      x = reference::round_to(spec.dtype, std::nearbyint(x * 64) / 64); // sums are exact
      x = token == other ? 0 : token > other ? -in.v[other * d + i % d] : x;
    }
    for (size_t i = 0; i < in.dout.size(); ++i)
      in.dout[i] = std::ldexp(in.dout[i], static_cast<int>(i / d % 5) - 2);
    const std::vector<float> zero_q(in.q.size(), 0.0f), zero_k(in.k.size(), 0.0f);
    const reference::Outputs<float> zeros = {.o = zero_q,
                                             .lse = std::vector<float>(in.q.size() / d, 0.0f)};
    in.q = zero_q, in.k = identity(1, n, 1);
    auto got = run_with_zeros(*attention, in);
    expect_bits(got.dq, emulate_like(spec, in, zeros).dq, spec.dtype);
    EXPECT_GT(norm(got.dq), 0);
    in.q = identity(2, m, 2), in.k = zero_k;
    got = run_with_zeros(*attention, in);
    expect_bits(got.dk, emulate_like(spec, in, zeros).dk, spec.dtype);
    EXPECT_GT(norm(got.dk), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, BitsOfHalfDp,
    testing::Values(bare("D64_fp16", 64, DType::fp16, Causal::none),
                    bare("D64_bf16_TopLeft", 64, DType::bf16, Causal::top_left),
                    bare("D128_fp16_BottomRight", 128, DType::fp16, Causal::bottom_right),
                    bare("D128_bf16", 128, DType::bf16, Causal::none),
                    bare("D72_fp16_TopLeft", 72, DType::fp16, Causal::top_left),
                    bare("D256_fp16", 256, DType::fp16, Causal::none),
                    bare("Fused_D64_fp16_TopLeft", 64, DType::fp16, Causal::top_left,
                         "mma 64x64 w4 s2 b1"),
                    bare("Fused_D128_fp16", 128, DType::fp16, Causal::none, "mma 64x128 w8 s1 b1"),
                    bare("Fused_D40_bf16", 40, DType::bf16, Causal::none, "mma 64x64 w4 s1 b2")),
    case_name);

class HalfDp : public CaseTest {
protected:
  /// Runs the same operation with sums in FP32.
  reference::Outputs<float> with_fp32(const reference::Inputs& in) const {
    AttentionSpec spec = GetParam().spec;
    spec.dp_sums = DpSums::fp32;
    Attention other(spec, 0, GetParam().tiles);
    return run(other, in);
  }
};

/// With sums of V as it is, a common part would take the digits: .02 at 10 deviations.
TEST_P(HalfDp, IsOfValuesLessTheirMean) {
  const AttentionSpec& spec = attention->spec();
  auto in = reference::random_inputs({1, 2, 1, 130, 300}, spec.head_dim, spec.dtype, 1, 17);
  for (float& x : in.v)
    x = reference::round_to(spec.dtype, x + 10);
  const auto got = run(*attention, in), fp32 = with_fp32(in);
  const auto exact = reference::exact(in, spec);
  EXPECT_EQ(got.dv, fp32.dv);
  EXPECT_LE(distance(got.dq, exact.dq).relative(), 1.05 * distance(fp32.dq, exact.dq).relative());
  EXPECT_LE(distance(got.dk, exact.dk).relative(), 1.05 * distance(fp32.dk, exact.dk).relative());
}

/// The powers of two are taken off again, whatever they are.
class HalfDpOfBf16 : public HalfDp {};
TEST_P(HalfDpOfBf16, HasTheSameDigitsAtAnyMagnitude) {
  const AttentionSpec& spec = attention->spec();
  auto in = reference::random_inputs({1, 2, 1, 130, 256}, spec.head_dim, spec.dtype, 1, 11);
  const auto dout = in.dout, v = in.v;
  const auto plain = run(*attention, in);
  const auto scaled = [](std::vector<float> x, int exponent) {
    for (float& value : x)
      value = std::ldexp(value, exponent);
    return x;
  };
  for (const auto& [of_dout, of_v] : {std::pair(13, 0), {-20, 0}, {0, 7}, {-60, 70}, {60, -55}}) {
    SCOPED_TRACE("dO times 2^" + std::to_string(of_dout) + ", V times 2^" + std::to_string(of_v));
    in.dout = scaled(dout, of_dout), in.v = scaled(v, of_v);
    const auto got = run(*attention, in);
    EXPECT_EQ(scaled(got.dq, -of_dout - of_v), plain.dq);
    EXPECT_EQ(scaled(got.dk, -of_dout - of_v), plain.dk);
  }
}

/// Rows and keys of other magnitudes than most: sums keep their bound.
TEST_P(HalfDp, OfUnlikeTokens) {
  const AttentionSpec& spec = attention->spec();
  const int64_t d = spec.head_dim;
  auto in = reference::random_inputs({1, 2, 2, 192, 320}, spec.head_dim, spec.dtype, 1, 11);
  for (size_t i = 0; i < in.dout.size(); ++i)
    in.dout[i] = std::ldexp(in.dout[i], static_cast<int>(i / d % 7) - 3);
  for (int64_t c = 0; c < d; ++c) { // the longest possible, of one sign with a row of dO
    in.v[200 * d + c] = 100;
    in.dout[50 * d + c] = 8;
  }
  const auto got = run(*attention, in), fp32 = with_fp32(in);
  const auto emulated = emulate_like(spec, in, got);
  const double limit =
      grouping_of(spec.granularity).one_scale ? kBlockEmulationLimit : kEmulationLimit;
  EXPECT_LE(distance(got.dq, emulated.dq).relative(), limit);
  EXPECT_LE(distance(got.dk, emulated.dk).relative(), limit);
  EXPECT_EQ(got.dv, fp32.dv);
  const auto exact = reference::exact(in, spec);
  EXPECT_LE(distance(got.dq, exact.dq).relative(), 1.2 * distance(fp32.dq, exact.dq).relative());
}

TEST_P(HalfDp, OfZerosIsZero) {
  const AttentionSpec& spec = attention->spec();
  const auto plain = reference::random_inputs({1, 1, 1, 70, 130}, spec.head_dim, spec.dtype, 1, 3);
  for (const char tensor : {'v', 'o'}) {
    SCOPED_TRACE(tensor);
    auto in = plain;
    auto& zeros = tensor == 'v' ? in.v : in.dout;
    std::fill(zeros.begin(), zeros.end(), 0.0f);
    const auto got = run(*attention, in);
    EXPECT_EQ(got.dq, std::vector<float>(got.dq.size(), 0.0f));
    EXPECT_EQ(got.dk, std::vector<float>(got.dk.size(), 0.0f));
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, HalfDp,
                         testing::ValuesIn(cases_named(
                             {"HalfDp_D64_bf16", "HalfDp_D128_fp16_TopLeft",
                              "HalfDp_D64_fp16_Block_TopLeft", "HalfDp_D128_bf16_Qk16_Unsmoothed",
                              "HalfDp_D72_bf16_Dv16_TopLeft", "HalfDp_D128_fp16_Gradients16",
                              "HalfDp_D256_bf16_TopLeft", "HalfDp_Fused_D64_bf16_TopLeft",
                              "HalfDp_Fused_D128_fp16", "Turns_HalfDp_D256_bf16_Gradients16",
                              "Turns_HalfDp_D160_fp16_Gradients16_BottomRight"})),
                         case_name);
// In 16 bits: scales of 8 bits are not the same digits at any magnitude.
INSTANTIATE_TEST_SUITE_P(Gpu, HalfDpOfBf16,
                         testing::ValuesIn(cases_named({"HalfDp_D160_bf16_Gradients16"})),
                         case_name);

} // namespace
