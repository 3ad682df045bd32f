//===- reference_emulation_test.cpp - The quantised computation's errors ---===//
#include "runtime/reference/named_inputs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

using namespace sagebwd;
using namespace sagebwd::reference;

namespace {

AttentionSpec spec_of(int head_dim, Granularity granularity = Granularity::row,
                      Causal causal = Causal::none) {
  AttentionSpec spec;
  spec.head_dim = head_dim;
  spec.granularity = granularity;
  spec.causal = causal;
  return resolved(spec);
}

using Errors = std::map<std::string, double>;
Errors errors_of(const Inputs& in, const AttentionSpec& spec, const ProductPlan& plan = {}) {
  Errors errors;
  for (const TraceRow& row : trace(in, spec, plan))
    errors[row.tensor] = row.figures.rel_l2;
  return errors;
}

/// Everything in 16 bits.
constexpr ProductPlan kNothing{false, false, false, false, false, false};

class GranularityTest : public testing::TestWithParam<Granularity> {};
INSTANTIATE_TEST_SUITE_P(Both, GranularityTest,
                         testing::Values(Granularity::row, Granularity::block),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Emulation, ErrorsAreThoseOfTheDesign) {
  const Inputs in = random_inputs({1, 2, 2, 1024, 1024}, 128, DType::bf16, 1, 1);
  const Errors row = errors_of(in, spec_of(128));
  // The larger of the paper's Table 1 and 1.1 times what scales of their own for every key and for
  // the channels of every 64 tokens give.
  EXPECT_LE(row.at("O"), .0160);
  EXPECT_LE(row.at("dQ"), .0217);
  EXPECT_LE(row.at("dK"), .0220);
  EXPECT_LE(row.at("dV"), .0159);
  const Errors block = errors_of(in, spec_of(128, Granularity::block));
  EXPECT_LE(block.at("O"), .021);
  EXPECT_LE(block.at("dQ"), .060);
  EXPECT_LE(block.at("dK"), .060);
  EXPECT_LE(block.at("dV"), .050);
  // Lower bounds: the quantisers are at work, and `block` is the coarser one.
  for (const char* tensor : {"O", "dQ", "dK", "dV"}) {
    EXPECT_GE(row.at(tensor), .005) << tensor;
    EXPECT_GE(block.at(tensor), (tensor == std::string("O") ? 1.1 : 1.3) * row.at(tensor))
        << tensor;
  }
}

TEST(Emulation, EveryProductOfThePlanCosts) {
  const Inputs in = random_inputs({1, 1, 1, 256, 256}, 64, DType::bf16, 1, 2);
  const AttentionSpec spec = spec_of(64);
  const Errors none = errors_of(in, spec, kNothing);
  for (const char* tensor : {"O", "dQ", "dK", "dV"})
    EXPECT_LE(none.at(tensor), .004) << tensor;
  const auto costs = [&](bool ProductPlan::*product, std::vector<std::string> tensors) {
    ProductPlan plan = kNothing;
    plan.*product = true;
    const Errors errors = errors_of(in, spec, plan);
    for (const auto& [tensor, error] : none) {
      const bool listed = std::find(tensors.begin(), tensors.end(), tensor) != tensors.end();
      if (listed)
        EXPECT_GE(errors.at(tensor), 1.5 * none.at(tensor)) << tensor;
      else
        EXPECT_LE(errors.at(tensor), 1.5 * none.at(tensor) + 1e-6) << tensor;
    }
  };
  costs(&ProductPlan::s, {"delta", "P", "dS", "O", "dQ", "dK", "dV"});
  costs(&ProductPlan::pv, {"delta", "O", "dS"});
  costs(&ProductPlan::dv, {"dV"});
  costs(&ProductPlan::dp, {"dP", "dS", "dQ", "dK"});
  costs(&ProductPlan::dq, {"dQ"});
  costs(&ProductPlan::dk, {"dK"});
}

TEST_P(GranularityTest, ShapesAndMasksAgreeWithExact) {
  const struct {
    Problem problem;
    Causal causal;
  } cases[] = {{{1, 1, 1, 1, 1}, Causal::none},
               {{2, 4, 2, 100, 150}, Causal::none},
               {{1, 4, 1, 200, 200}, Causal::top_left},
               {{1, 2, 2, 70, 200}, Causal::bottom_right},
               {{1, 2, 2, 200, 70}, Causal::bottom_right},
               {{1, 2, 2, 300, 70}, Causal::top_left},
               {{1, 2, 1, 1, 333}, Causal::bottom_right}};
  for (const auto& c : cases) {
    const Inputs in = random_inputs(c.problem, 64, DType::fp16, 1, 4);
    AttentionSpec spec = spec_of(64, GetParam(), c.causal);
    spec.dtype = DType::fp16;
    const Outputs<double> expected = exact(in, c.causal);
    for (const bool rotate : {false, true}) {
      spec.rotate = rotate;
      const Outputs<float> out = emulate(in, spec, {});
      EXPECT_LE(compare(out.o, expected.o).rel_l2, .04);
      EXPECT_LE(compare(out.dv, expected.dv).rel_l2, .08);
      if (c.problem.seq_kv > 1) { // of one key, dQ and dK are rounding errors of zero
        EXPECT_LE(compare(out.dq, expected.dq).rel_l2, .10);
        EXPECT_LE(compare(out.dk, expected.dk).rel_l2, .10);
      }
      for (size_t i = 0; i < out.lse.size(); ++i) {
        if (std::isinf(expected.lse[i]))
          EXPECT_EQ(out.lse[i], expected.lse[i]);
        else
          EXPECT_NEAR(out.lse[i], expected.lse[i], .05); // raw: with the keys' mean
      }
    }
  }
}

TEST(Emulation, QueriesThatSeeNothingAreZero) {
  const Inputs in = random_inputs({1, 1, 1, 200, 70}, 64, DType::bf16, 1, 4);
  const Outputs<float> out =
      emulate(in, spec_of(64, Granularity::row, Causal::bottom_right), {}, true);
  for (int i = 0; i < 130; ++i) {
    EXPECT_EQ(out.lse[i], -std::numeric_limits<float>::infinity());
    for (int c = 0; c < 64; ++c) {
      EXPECT_EQ(out.o[i * 64 + c], 0);
      EXPECT_EQ(out.dq[i * 64 + c], 0);
    }
    for (int j = 0; j < 70; ++j)
      EXPECT_EQ(out.p[i * 70 + j], 0);
  }
}

/// Keys with a common offset, which softmax does not see.
Inputs with_key_offset(float offset) {
  Inputs in = random_inputs({1, 1, 1, 256, 256}, 64, DType::bf16, 1, 6);
  for (size_t i = 0; i < in.k.size(); ++i)
    in.k[i] = round_to(DType::bf16, in.k[i] + offset * (i % 64 < 8));
  return in;
}

TEST_P(GranularityTest, SmoothingTakesTheKeysOffsetAway) {
  AttentionSpec spec = spec_of(64, GetParam());
  spec.rotate = false;
  const Errors plain = errors_of(with_key_offset(0), spec);
  const Errors smoothed = errors_of(with_key_offset(20), spec);
  spec.smooth_k = false;
  const Errors raw = errors_of(with_key_offset(20), spec);
  for (const char* tensor : {"O", "dQ", "dK", "dV"}) {
    EXPECT_LE(smoothed.at(tensor), 1.2 * plain.at(tensor)) << tensor;
    EXPECT_GE(raw.at(tensor), 1.3 * smoothed.at(tensor)) << tensor;
  }
  // dK and dV have coarse scales of their own under `block`; these two show it plainly.
  EXPECT_GE(raw.at("O"), 3 * smoothed.at("O"));
  EXPECT_GE(raw.at("dQ"), 5 * smoothed.at("dQ"));
}

TEST(Emulation, RotationSpreadsOutlierChannels) {
  AttentionSpec spec = spec_of(64), unrotated = spec;
  unrotated.rotate = false;
  double rotated = 0, plain = 0; // over several draws: single ones differ by a fifth
  for (uint64_t seed = 0; seed < 4; ++seed) {
    Inputs in = random_inputs({1, 1, 1, 256, 256}, 64, DType::bf16, 1, seed);
    for (size_t i = 0; i < in.q.size(); ++i)
      if (i % 64 < 2) {
        in.q[i] *= 8;
        in.k[i] *= 2;
      }
    rotated += errors_of(in, spec).at("P");
    plain += errors_of(in, unrotated).at("P");
  }
  EXPECT_GE(plain, 1.5 * rotated);
}

TEST(Emulation, WhatAllChannelsHaveInCommonIsSpread) {
  for (int channels : {64, 128}) {
    const auto errors = [&](Distribution distribution, bool rotate) {
      AttentionSpec spec = spec_of(channels);
      spec.rotate = rotate;
      const Problem problem{1, 1, 1, 256, 256};
      return errors_of(named_inputs({distribution}, problem, channels, DType::bf16, 3), spec);
    };
    for (const Distribution distribution :
         {Distribution::alternating_keys, Distribution::common_offset}) {
      const Errors rotated = errors(distribution, true), plain = errors(distribution, false);
      for (const char* tensor : {"O", "dQ", "dK", "dV"})
        EXPECT_LE(rotated.at(tensor), 1.5 * plain.at(tensor)) << tensor << ", " << channels;
    }
  }
}

/// As long as the type holds them, small numbers cost what large ones do; below 2^-119 a group is
/// zeros, which gradients of products reach first.
TEST_P(GranularityTest, MagnitudesCostNothing) {
  const Inputs plain = random_inputs({1, 1, 1, 600, 600}, 64, DType::bf16, 1, 7);
  const AttentionSpec spec = spec_of(64, GetParam());
  const Errors expected = errors_of(plain, spec);
  const auto times = [](std::vector<float>& x, float factor) {
    for (float& value : x)
      value *= factor; // a power of two
  };
  for (int octaves : {-95, -61, 60, 95}) {
    const float factor = std::ldexp(1.0f, octaves);
    Inputs values = plain, keys = plain, queries = plain;
    times(values.v, factor);
    times(keys.k, factor), times(keys.q, 1 / factor);
    times(queries.q, factor), times(queries.k, 1 / factor);
    for (const Inputs& in : {values, keys, queries}) {
      const Errors errors = errors_of(in, spec);
      for (const char* tensor : {"O", "dQ", "dK", "dV"})
        EXPECT_NEAR(errors.at(tensor), expected.at(tensor), 0.01 * expected.at(tensor))
            << tensor << ", 2^" << octaves;
    }
  }
}

/// Causal, with a first key that takes about half of each row's mass: `value` times as large as its
/// value would be.
Inputs with_sink(int64_t tokens, float value) {
  constexpr int kChannels = 128, kSinkChannels = 4;
  Inputs in = random_inputs({1, 1, 1, tokens, tokens}, kChannels, DType::bf16, 1, 9);
  const double logit = std::log(static_cast<double>(tokens)) + .5;
  const auto sink = static_cast<float>(logit * std::sqrt(double(kChannels)) / 8);
  const std::vector<float> spread = random_inputs({1, 1, 1, tokens, 1}, 1, DType::bf16, 1, 10).q;
  for (size_t i = 0; i < in.q.size(); ++i) {
    if (i % kChannels < kSinkChannels) {
      in.q[i] = 2 + .3f * in.q[i];
      in.k[i] = i < kChannels ? sink : .3f * in.k[i];
    }
    if (i < kChannels)
      in.v[i] *= value;
    in.dout[i] *= 1e-4f * std::exp(spread[i / kChannels]);
  }
  for (auto* tensor : {&in.q, &in.k, &in.v, &in.dout})
    for (float& x : *tensor)
      x = round_to(DType::bf16, x);
  return in;
}

TEST(Emulation, TheFirstKeyMayTakeMostOfTheMass) {
  AttentionSpec spec = spec_of(128, Granularity::row, Causal::top_left);
  const Inputs in = with_sink(1024, .05f);
  const Errors apart = errors_of(in, spec);
  EXPECT_LE(apart.at("O"), .010);
  EXPECT_LE(apart.at("dQ"), .020);
  EXPECT_LE(apart.at("dK"), .023);
  spec.sink_keys = 0;
  const Errors together = errors_of(in, spec);
  for (const char* tensor : {"O", "dQ", "dK"})
    EXPECT_GE(together.at(tensor), 3 * apart.at(tensor)) << tensor;
}

TEST(Emulation, TheFirstKeyMayBeLarge) {
  Inputs in = random_inputs({1, 1, 1, 1024, 1024}, 128, DType::bf16, 1, 12);
  for (int c = 0; c < 128; ++c)
    in.k[c] = round_to(DType::bf16, in.k[c] * 30);
  for (Causal causal : {Causal::none, Causal::top_left})
    EXPECT_LE(errors_of(in, spec_of(128, Granularity::row, causal)).at("dQ"), .03);
}

TEST(Emulation, TheFirstKeyIsApartInEveryPlan) {
  const Inputs in = with_sink(256, 1);
  const Outputs<double> expected = exact(in, Causal::top_left, true);
  for (const Precision precision :
       {Precision::six_of_seven, Precision::qk16, Precision::dv16, Precision::gradients16}) {
    AttentionSpec spec = spec_of(128, Granularity::row, Causal::top_left);
    const Outputs<float> out = emulate(in, spec, plan_of(precision), true);
    for (const auto& [x, r] : {std::pair(&out.p, &expected.p), {&out.dp, &expected.dp}})
      for (int i = 0; i < 256; ++i)
        EXPECT_NEAR((*x)[i * 256], (*r)[i * 256], .03 * std::fabs((*r)[i * 256]));
    EXPECT_LE(compare(out.dq, expected.dq).rel_l2, .03);
    EXPECT_LE(compare(out.dk, expected.dk).rel_l2, .03);
    EXPECT_LE(compare(out.dv, expected.dv).rel_l2, .03);
  }
}

TEST(Emulation, FewerInt8ProductsAreMoreAccurate) {
  const Inputs in = random_inputs({1, 1, 1, 512, 512}, 128, DType::bf16, 1, 13);
  const AttentionSpec spec = spec_of(128);
  const Errors most = errors_of(in, spec, plan_of(Precision::six_of_seven));
  const Errors dv16 = errors_of(in, spec, plan_of(Precision::dv16));
  const Errors gradients16 = errors_of(in, spec, plan_of(Precision::gradients16));
  EXPECT_LE(dv16.at("dV"), .9 * most.at("dV"));
  EXPECT_NEAR(dv16.at("dK"), most.at("dK"), 1e-6);
  for (const char* tensor : {"dQ", "dK", "dV"})
    EXPECT_LE(gradients16.at(tensor), .9 * most.at(tensor)) << tensor;
  EXPECT_EQ(gradients16.at("O"), most.at("O"));
}

/// Magnitudes of dO's rows differ by powers of two that P takes up: no scale is shared by far ones.
TEST(Emulation, RowsOfGradientsMayDiffer) {
  Inputs in = random_inputs({1, 1, 1, 512, 512}, 64, DType::bf16, 1, 14);
  const Errors even = errors_of(in, spec_of(64));
  for (size_t i = 0; i < in.dout.size(); ++i)
    in.dout[i] = std::ldexp(in.dout[i], static_cast<int>(i / 64 * 7 % 40) - 60);
  const Errors uneven = errors_of(in, spec_of(64));
  for (const char* tensor : {"dP", "dS", "dQ", "dK", "dV"})
    EXPECT_LE(uneven.at(tensor), 1.5 * even.at(tensor)) << tensor;
}

TEST(Emulation, GradientThroughLseReachesEveryPlan) {
  Inputs in = with_key_offset(4);
  in.dlse = random_inputs({1, 1, 1, 256, 1}, 1, DType::bf16, 2, 8).q;
  const Outputs<double> expected = exact(in, Causal::none);
  for (const ProductPlan& plan :
       {ProductPlan{}, plan_of(Precision::qk16), plan_of(Precision::gradients16), kNothing})
    for (const bool smooth : {true, false}) {
      AttentionSpec spec = spec_of(64);
      spec.smooth_k = smooth;
      spec.sink_keys = smooth;
      const Outputs<float> out = emulate(in, spec, plan);
      EXPECT_LE(compare(out.dq, expected.dq).rel_l2, .03);
      EXPECT_LE(compare(out.dk, expected.dk).rel_l2, .03);
    }
}

TEST(Emulation, BackwardStartsFromWhatIsGiven) {
  const Inputs in = random_inputs({1, 2, 1, 100, 100}, 64, DType::bf16, 1, 6);
  const AttentionSpec spec = spec_of(64);
  const Outputs<float> own = emulate(in, spec, {}, false, true);
  const Outputs<float> same = emulate(in, spec, {}, false, true, &own.o, &own.lse);
  EXPECT_EQ(own.dq, same.dq);
  EXPECT_EQ(own.dk, same.dk);
  EXPECT_EQ(own.dv, same.dv);
  for (float x : own.dk)
    EXPECT_EQ(x, round_to(DType::bf16, x));
  std::vector<float> higher = own.lse;
  for (float& x : higher)
    x += std::log(2.0f); // halves P, hence dV
  const Outputs<float> halved = emulate(in, spec, {}, false, false, &own.o, &higher);
  const Outputs<float> whole = emulate(in, spec, {}, false, false, &own.o, &own.lse);
  for (size_t i = 0; i < whole.dv.size(); ++i)
    EXPECT_NEAR(2 * halved.dv[i], whole.dv[i], .02);
}

TEST_P(GranularityTest, NonFiniteInputsReachTheOutputs) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto finite = [](const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
  };
  for (const float bad : {kNan, kInfinity, -kInfinity})
    for (const Precision precision : {Precision::six_of_seven, Precision::qk16})
      for (const auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
        Inputs in = random_inputs({1, 1, 1, 150, 150}, 64, DType::bf16, 1, 5);
        (in.*tensor)[100 * 64 + 3] = bad;
        const Outputs<float> out = emulate(in, spec_of(64, GetParam()), plan_of(precision));
        EXPECT_EQ(finite(out.o), tensor == &Inputs::dout);
        EXPECT_FALSE(finite(out.dq));
        EXPECT_FALSE(finite(out.dk));
        EXPECT_EQ(finite(out.dv), tensor == &Inputs::v); // dV = P^T dO has no V in it
      }
}

TEST(Emulation, RefusesWhatItCannotFollow) {
  const Inputs in = random_inputs({1, 1, 1, 4, 4}, 64, DType::bf16, 1, 5);
  EXPECT_THROW(emulate(in, spec_of(128), {}), SpecError);
  AttentionSpec unresolved;
  unresolved.head_dim = 64;
  EXPECT_THROW(emulate(in, unresolved, {}), SpecError);
  AttentionSpec spec = spec_of(64);
  spec.group_kv = 96; // across the edge of a unit of 256
  EXPECT_THROW(emulate(in, spec, {}), SpecError);
  spec = spec_of(64, Granularity::block);
  spec.sink_keys = 1;
  EXPECT_THROW(emulate(in, spec, {}), SpecError);
}

} // namespace
