//===- numerics_test.cpp - Outputs against FP64 and the emulation ----------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

reference::Inputs inputs_for(const AttentionSpec& spec, const Problem& problem) {
  return reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 7);
}

/// Deterministic, of both signs, about 1 in size.
void add_dlse(reference::Inputs& in) {
  const Problem& p = in.problem;
  in.dlse.resize(p.batch * p.heads * p.seq_q);
  for (size_t i = 0; i < in.dlse.size(); ++i)
    in.dlse[i] = std::sin(static_cast<float>(i) * 1.7f);
}

/// Relative L2 against FP64 at sigma 1 and some hundred tokens.
struct Limits {
  double out, gradients_of_scores, dv, lse;
};
Limits limits_of(const AttentionSpec& spec) {
  return spec.granularity == Granularity::row ? Limits{0.02, 0.03, 0.02, 0.002}
                                              : Limits{0.03, 0.08, 0.05, 0.002};
}

void expect_close(const Attention& attention, const reference::Inputs& in,
                  const reference::Outputs<float>& got) {
  const auto exact = reference::exact(in, attention.spec());
  const Limits limits = limits_of(attention.spec());
  EXPECT_LE(distance(got.o, exact.o).relative(), limits.out);
  EXPECT_LE(distance(got.lse, exact.lse).relative(), limits.lse);
  EXPECT_LE(distance(got.dq, exact.dq).relative(), limits.gradients_of_scores);
  EXPECT_LE(distance(got.dk, exact.dk).relative(), limits.gradients_of_scores);
  EXPECT_LE(distance(got.dv, exact.dv).relative(), limits.dv);

  const auto emulated = emulate_like(attention.spec(), in, got);
  const double limit =
      grouping_of(attention.spec()->granularity).one_scale ? kBlockEmulationLimit : kEmulationLimit;
  EXPECT_LE(distance(got.o, emulated.o).relative(), limit);
  EXPECT_LE(distance(got.lse, emulated.lse).relative(), limit);
  EXPECT_LE(distance(got.dq, emulated.dq).relative(), limit);
  EXPECT_LE(distance(got.dk, emulated.dk).relative(), limit);
  EXPECT_LE(distance(got.dv, emulated.dv).relative(), limit);
}

class Numerics : public CaseTest {};

TEST_P(Numerics, NearExactAndEmulated) {
  const auto in = inputs_for(attention->spec(), {1, 4, 2, 320, 600});
  expect_close(*attention, in, run(*attention, in));
}

TEST_P(Numerics, GradientThroughLse) {
  auto in = inputs_for(attention->spec(), {1, 2, 1, 512, 512});
  if (attention->spec()->smooth_k) // keys with a mean, which dQ needs back
    for (float& x : in.k)
      x = reference::round_to(attention->spec()->dtype, x + 2);
  add_dlse(in);
  const auto got = run(*attention, in);
  expect_close(*attention, in, got);
  // It is a gradient that counts: without it dQ is another.
  in.dlse.clear();
  const auto without = run(*attention, in);
  EXPECT_GE(distance(got.dq, without.dq).relative(), 0.02);
}

TEST_P(Numerics, AnyLengths) {
  const AttentionSpec& spec = attention->spec();
  // If the first key is not apart, its value is rounded by the scales of its whole unit. The
  // emulation alone is off by up to .163 then (dK of one query and 300 keys), else by .043.
  const double against_exact = spec.sink_keys > 0 ? 0.1 : 0.2;
  constexpr double kAgainstEmulation = 0.02; // of few numbers, one flipped rounding weighs more
  const std::pair<int64_t, int64_t> lengths[] = {{1, 1},   {1, 300},   {63, 1},   {2, 65},
                                                 {65, 64}, {300, 129}, {129, 300}};
  for (const auto& [m, n] : lengths) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    const auto in = inputs_for(spec, {1, 2, 1, m, n});
    const auto got = run(*attention, in);
    const auto exact = reference::exact(in, spec);
    const auto emulated = emulate_like(spec, in, got);
    EXPECT_LE(distance(got.lse, exact.lse).largest_error, 0.1);
    EXPECT_LE(distance(got.lse, emulated.lse).largest_error, 1e-3);

    // If rows see one key, dS = dP - delta is nothing but rounding: errors are then measured by
    // what is subtracted.
    const double terms =
        norm(in.dout) * longest_token(in.v, spec.head_dim) / std::sqrt(spec.head_dim) / 128;
    const auto expect_near = [&](const char* name, const std::vector<float>& x,
                                 const std::vector<double>& fp64, const std::vector<float>& cpu,
                                 double at_least) {
      SCOPED_TRACE(name);
      const Distance to_exact = distance(x, fp64), to_emulated = distance(x, cpu);
      EXPECT_LE(to_exact.error, against_exact * std::max(to_exact.norm, at_least));
      EXPECT_LE(to_emulated.error, kAgainstEmulation * std::max(to_emulated.norm, at_least));
    };
    expect_near("out", got.o, exact.o, emulated.o, 0);
    expect_near("dv", got.dv, exact.dv, emulated.dv, 0);
    expect_near("dq", got.dq, exact.dq, emulated.dq, terms * longest_token(in.k, spec.head_dim));
    expect_near("dk", got.dk, exact.dk, emulated.dk, terms * longest_token(in.q, spec.head_dim));
  }
}

TEST_P(Numerics, SameBitsWhateverTheMemoryAndTheStream) {
  const auto in = inputs_for(attention->spec(), {2, 4, 2, 130, 200});
  const auto first = run(*attention, in);
  const auto expect_same = [&](reference::Outputs<float> got) {
    if (!attention->spec()->deterministic) { // dQ's sums are in any order, and then rounded
      EXPECT_LE(distance(got.dq, first.dq).relative(), 1e-3);
      got.dq = first.dq;
    }
    expect_identical(got, first);
  };
  {
    SCOPED_TRACE("again");
    expect_same(run(*attention, in));
  }
  {
    SCOPED_TRACE("a workspace of zeros");
    expect_same(run(*attention, in, {{}, nullptr, 0}));
  }
  for (const Layout layout : {Layout{false, 8}, Layout{true, 0}, Layout{true, 24}}) {
    SCOPED_TRACE(std::string(layout.bshd ? "BSHD" : "BHSD") + " with a padding of " +
                 std::to_string(layout.padding));
    expect_same(run(*attention, in, {layout, nullptr, kPoison}));
  }
  SCOPED_TRACE("a stream of its own");
  const driver::Stream stream = driver::create_stream();
  expect_same(run(*attention, in, {{}, stream, kPoison}));
  driver::destroy_stream(stream);
}

INSTANTIATE_TEST_SUITE_P(Gpu, Numerics, testing::ValuesIn(all_cases()), case_name);

class SomeNumerics : public CaseTest {};

TEST_P(SomeNumerics, GroupedQueries) {
  for (const int64_t heads_kv : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(heads_kv) + " key/value heads");
    const auto in = inputs_for(attention->spec(), {1, 6, heads_kv, 256, 200});
    expect_close(*attention, in, run(*attention, in));
  }
}

TEST_P(SomeNumerics, SoftmaxScale) {
  auto in = inputs_for(attention->spec(), {1, 2, 2, 512, 512});
  const float usual = 1 / std::sqrt(static_cast<float>(in.head_dim));
  for (float scale : {0.5f * usual, -usual, 0.0f}) {
    SCOPED_TRACE(scale);
    in.softmax_scale = scale;
    if (scale < 0 && attention->spec()->precision == Precision::qk16)
      continue; // refused
    const auto got = run(*attention, in);
    if (scale != 0) {
      expect_close(*attention, in, got);
      continue;
    }
    // All keys weigh the same; dQ and dK are zero.
    const auto exact = reference::exact(in, attention->spec());
    EXPECT_LE(distance(got.o, exact.o).relative(), 0.05); // of small numbers
    EXPECT_LE(distance(got.lse, exact.lse).relative(), 1e-5);
    EXPECT_LE(distance(got.dv, exact.dv).relative(), 0.05);
    for (const auto* x : {&got.dq, &got.dk})
      EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](float value) { return value == 0; }));
  }
}

/// Without smoothing a key of zeros, as there are behind the last one, would have a score of 0 and,
/// where all others have -128, a P of infinity.
TEST_P(SomeNumerics, ScoresFarBelowZero) {
  const AttentionSpec& spec = attention->spec();
  auto in = inputs_for(spec, {1, 2, 2, 70, 90});
  in.softmax_scale = 0.125f;
  for (size_t i = 0; i < in.q.size(); i += spec.head_dim)
    in.q[i] = 16;
  for (size_t i = 0; i < in.k.size(); i += spec.head_dim)
    in.k[i] = -64;
  const auto got = run(*attention, in);
  const auto emulated = emulate_like(spec, in, got);
  EXPECT_LE(distance(got.o, emulated.o).relative(), kBlockEmulationLimit);
  EXPECT_LE(distance(got.lse, emulated.lse).relative(), kBlockEmulationLimit);
  EXPECT_LE(distance(got.dq, emulated.dq).relative(), kBlockEmulationLimit);
  EXPECT_LE(distance(got.dk, emulated.dk).relative(), kBlockEmulationLimit);
  EXPECT_LE(distance(got.dv, emulated.dv).relative(), kBlockEmulationLimit);
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, SomeNumerics,
    testing::ValuesIn(cases_named(
        {"D128_bf16_Row", "D128_bf16_Block", "Mma_D128_bf16_Row64", "D128_bf16_Row_Unsmoothed",
         "Fused_D64_fp16_Unsmoothed", "FusedWs_D64_fp16_TopLeft_Unsmoothed", "FusedWs_D128_bf16",
         "Fp16Sums_D64_fp16_TopLeft_Unsmoothed", "Fp16Sums_D128_bf16", "HalfDp_D64_bf16",
         "HalfDp_D128_bf16_Qk16_Unsmoothed", "D256_bf16_Row", "D256_bf16_Gradients16_TopLeft",
         "D512_bf16_Row", "D320_fp16_Gradients16_TopLeft"})),
    case_name);

class BlindRows : public CaseTest {
protected:
  /// Both passes, the backward with another lse than the forward's.
  reference::Outputs<float> run_with_lse(const reference::Inputs& in,
                                         const std::vector<float>& lse) {
    driver::DeviceScope scope(0);
    Operands operands(*attention, in);
    attention->forward(operands.forward);
    driver::synchronize();
    operands.lse.upload(lse);
    driver::synchronize();
    attention->backward(operands.backward);
    driver::synchronize();
    return downloaded(operands);
  }
};

TEST_P(BlindRows, GiveZeroAndNoGradient) {
  const int64_t unit = channel_tokens_q(attention->spec()), m = unit + 136, n = 70, blind = m - n;
  const int64_t d = attention->spec()->head_dim;
  auto in = inputs_for(attention->spec(), {1, 2, 1, m, n});
  const auto check = [&] {
    const auto got = run(*attention, in);
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t i = 0; i < blind; ++i) {
        ASSERT_EQ(got.lse[head * m + i], -INFINITY) << "query " << i;
        for (int64_t c = 0; c < d; ++c) {
          ASSERT_EQ(got.o[(head * m + i) * d + c], 0) << "query " << i;
          ASSERT_EQ(got.dq[(head * m + i) * d + c], 0) << "query " << i;
        }
      }
    // The dO of the blind rows reaches no key.
    auto other = in;
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t i = 0; i < blind / unit * unit * d; ++i) // whole units: scales are their own
        other.dout[head * m * d + i] *= 3;
    const auto again = run(*attention, other);
    EXPECT_EQ(again.dk, got.dk);
    EXPECT_EQ(again.dv, got.dv);
    // Nor does their lse, which is that of all keys where these are a part: finite, and any.
    auto lse = got.lse;
    for (int64_t head = 0; head < 2; ++head)
      std::fill_n(lse.begin() + head * m, blind, -30.0f);
    const auto part = run_with_lse(in, lse);
    EXPECT_EQ(part.dq, got.dq);
    EXPECT_EQ(part.dk, got.dk);
    EXPECT_EQ(part.dv, got.dv);
  };
  check();
  SCOPED_TRACE("with a gradient of lse");
  add_dlse(in);
  check();
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, BlindRows,
    testing::ValuesIn(cases_named(
        {"D128_fp16_Row_BottomRight", "D128_bf16_Block_Qk16_BottomRight",
         "SmoothQ_D128_bf16_Block_BottomRight", "SmoothV_D128_fp16_Row_BottomRight",
         "Mma_D128_fp16_Qk16_BottomRight", "Fused_D64_bf16_BottomRight_4Warps",
         "FusedWs_D128_bf16_BottomRight_NoSink", "FusedWs_D64_bf16_Block_BottomRight",
         "Fp16Sums_D128_bf16_BottomRight_NoSink", "Fp16Sums_D64_bf16_Block_BottomRight",
         "HalfDp_D128_bf16_BottomRight_NoSink", "D256_bf16_Row_BottomRight_NoSink",
         "D256_fp16_Gradients16_BottomRight", "D512_bf16_Gradients16_BottomRight",
         "D512_bf16_Row_BottomRight_NoSink", "Team_D512_fp16_Gradients16_BottomRight"})),
    case_name);

} // namespace
