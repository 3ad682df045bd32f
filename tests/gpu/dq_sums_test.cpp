//===- dq_sums_test.cpp - Sums of dQ in FP16, whatever their range ----------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <algorithm>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class DqSums : public CaseTest {
protected:
  reference::Inputs inputs(const Problem& problem) const {
    const AttentionSpec& spec = attention->spec();
    return reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 11);
  }
  /// Runs the same operation with sums in FP32.
  reference::Outputs<float> with_fp32(const reference::Inputs& in) const {
    AttentionSpec spec = GetParam().spec;
    spec.dq_sums = sagebwd::DqSums::fp32;
    Attention other(spec, 0, GetParam().tiles);
    return run(other, in);
  }
  bool has_range_of_fp32() const { return attention->spec()->dtype == DType::bf16; }
};

std::vector<float> scaled(std::vector<float> x, int exponent) {
  for (float& value : x)
    value = std::ldexp(value, exponent);
  return x;
}

/// Factors are powers of two that follow dO's and V's. Two blocks of keys add up the same in either
/// order. Squares of the last two leave FP32's range.
class DqSumsOfBf16 : public DqSums {};
TEST_P(DqSumsOfBf16, HaveTheSameDigitsAtAnyMagnitude) {
  auto in = inputs({1, 2, 1, 130, 256});
  const auto dout = in.dout, v = in.v;
  const auto plain = run(*attention, in).dq;
  for (const auto& [of_dout, of_v] : {std::pair(13, 0), {-20, 0}, {0, 7}, {-60, 70}, {60, -55}}) {
    SCOPED_TRACE("dO times 2^" + std::to_string(of_dout) + ", V times 2^" + std::to_string(of_v));
    in.dout = scaled(dout, of_dout), in.v = scaled(v, of_v);
    EXPECT_EQ(scaled(run(*attention, in).dq, -of_dout - of_v), plain);
  }
}

/// Rows, tokens and heads that differ a thousandfold each have factors of their own, or one that
/// leaves them digits: sums are then those of FP32 but for FP16's rounding of eight of them.
TEST_P(DqSums, OfUnlikeTokens) {
  const int64_t d = attention->spec()->head_dim;
  auto in = inputs({1, 2, 2, 192, 1024});
  const bool wide = has_range_of_fp32();
  for (size_t i = 0; i < in.dout.size(); ++i)
    in.dout[i] = std::ldexp(in.dout[i], static_cast<int>(i / d % 7 * (wide ? 6 : 1)) - 3);
  for (int64_t c = 0; c < d; ++c)
    in.v[700 * d + c] = reference::round_to(attention->spec()->dtype, in.v[700 * d + c] * 100);
  const auto got = run(*attention, in), fp32 = with_fp32(in);
  EXPECT_EQ(got.dk, fp32.dk);
  EXPECT_EQ(got.dv, fp32.dv);
  EXPECT_LE(distance(got.dq, fp32.dq).relative(), kEmulationLimit);
  // Row by row, so that the largest hide no others: as where one sum after another is rounded by
  // 2^-11 of itself at most, and dQ's own rounding differs where they do.
  const auto of_row = [&](const std::vector<float>& x, size_t row) {
    return std::vector<float>(x.begin() + row * d, x.begin() + (row + 1) * d);
  };
  for (size_t row = 0; row < got.dq.size() / d; ++row)
    EXPECT_LE(distance(of_row(got.dq, row), of_row(fp32.dq, row)).relative(), 8 * 0x1p-11 + 0x1p-8)
        << row;
}

/// All keys pull dQ the same way and the bound is reached: it takes the whole range and no more.
TEST_P(DqSums, ReachTheirBound) {
  const AttentionSpec& spec = attention->spec();
  const int64_t d = spec.head_dim, n = 1024;
  reference::Inputs in = inputs({1, 1, 1, 64, n});
  std::fill(in.q.begin(), in.q.end(), 0.0f);
  for (size_t i = 0; i < in.k.size(); ++i) {
    const float sign = i / d % 2 ? 1.0f : -1.0f;
    in.k[i] = i % d == 5 ? 1.5f * sign : 0.0f;
    in.v[i] = 1.25f * sign;
  }
  for (float& x : in.dout)
    x = 1.125f;
  const auto got = run(*attention, in);
  const auto exact = reference::exact(in, spec);
  // 8 blocks, whose sums are each rounded by 2^-11 of themselves at most, scores in 8 bits, and dS
  // and dQ in 16.
  EXPECT_LE(distance(got.dq, exact.dq).relative(), 0.02);
}

TEST_P(DqSums, OfZerosAreZero) {
  const auto plain = inputs({1, 2, 1, 70, 300});
  for (const char tensor : {'k', 'v', 'o'}) {
    SCOPED_TRACE(tensor);
    auto in = plain;
    auto& zeros = tensor == 'k' ? in.k : tensor == 'v' ? in.v : in.dout;
    std::fill(zeros.begin(), zeros.end(), 0.0f);
    const auto got = run(*attention, in).dq;
    EXPECT_EQ(got, std::vector<float>(got.size(), 0.0f));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, DqSums,
    testing::ValuesIn(cases_named({"Fp16Sums_D64_bf16", "Fp16Sums_D64_fp16_TopLeft_Unsmoothed",
                                   "Fp16Sums_D64_bf16_Block_BottomRight", "Fp16Sums_D128_bf16",
                                   "Fp16Sums_D128_fp16_TopLeft"})),
    case_name);
INSTANTIATE_TEST_SUITE_P(Gpu, DqSumsOfBf16,
                         testing::ValuesIn(cases_named({"Fp16Sums_D64_bf16",
                                                        "Fp16Sums_D64_bf16_Block_BottomRight",
                                                        "Fp16Sums_D128_bf16"})),
                         case_name);

} // namespace
