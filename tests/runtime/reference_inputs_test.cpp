//===- reference_inputs_test.cpp - What defines each of the named inputs --===//
#include "runtime/reference/named_inputs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

using namespace sagebwd;
using namespace sagebwd::reference;

namespace {

constexpr int kChannels = 64;
const Problem kProblem{1, 2, 2, 512, 512};

Inputs make(Distribution distribution, const Problem& problem = kProblem, uint64_t seed = 1,
            DType dtype = DType::bf16) {
  return named_inputs({distribution}, problem, kChannels, dtype, seed);
}

/// The root mean square of each row.
std::vector<double> sizes_of_rows(const std::vector<float>& x) {
  std::vector<double> sizes;
  for (auto row = x.begin(); row != x.end(); row += kChannels)
    sizes.push_back(std::sqrt(std::inner_product(row, row + kChannels, row, 0.0) / kChannels));
  return sizes;
}

struct Moments {
  double mean = 0, deviation = 0;
};
template <typename T> Moments moments_of(const std::vector<T>& x) {
  Moments m;
  m.mean = std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
  for (T value : x)
    m.deviation += (value - m.mean) * (value - m.mean) / static_cast<double>(x.size());
  m.deviation = std::sqrt(m.deviation);
  return m;
}

/// Gives the moments of one channel over all rows.
Moments channel(const std::vector<float>& x, int index) {
  std::vector<float> values;
  for (size_t i = index; i < x.size(); i += kChannels)
    values.push_back(x[i]);
  return moments_of(values);
}

/// Gradients' rows: about 1e-4 in size, the logarithm of which has this deviation.
void expect_small_gradients(const Inputs& in, double deviation) {
  std::vector<double> logs = sizes_of_rows(in.dout);
  for (double& size : logs)
    size = std::log(size);
  const Moments m = moments_of(logs);
  EXPECT_NEAR(m.mean, std::log(1e-4), 0.15);
  EXPECT_NEAR(m.deviation, deviation, 0.1 + 0.07 * deviation);
}

/// P of each of the last `count` queries of each head for one key.
std::vector<double> mass(const Inputs& in, Causal mask, int64_t key, int64_t count) {
  Inputs forward = in;
  forward.dout.clear();
  const auto p = exact(forward, mask, /*keep_matrices=*/true).p;
  const int64_t m = in.problem.seq_q, n = in.problem.seq_kv;
  std::vector<double> masses;
  for (int64_t head = 0; head < in.problem.batch * in.problem.heads; ++head)
    for (int64_t i = m - count; i < m; ++i)
      masses.push_back(p[(head * m + i) * n + key]);
  return masses;
}

class EveryInput : public testing::TestWithParam<Distribution> {};

TEST_P(EveryInput, IsRoundedAndOfItsSeed) {
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    const Problem problem{2, 4, 2, 33, 70};
    const Inputs a = make(GetParam(), problem, 1, dtype);
    const Inputs again = make(GetParam(), problem, 1, dtype);
    const Inputs other = make(GetParam(), problem, 2, dtype);
    for (const auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
      const bool of_queries = tensor == &Inputs::q || tensor == &Inputs::dout;
      EXPECT_EQ((a.*tensor).size(), size_t(2) * (of_queries ? 4 * 33 : 2 * 70) * kChannels);
      EXPECT_EQ(a.*tensor, again.*tensor);
      EXPECT_NE(a.*tensor, other.*tensor);
      for (float x : a.*tensor) {
        ASSERT_TRUE(std::isfinite(x));
        ASSERT_EQ(x, round_to(dtype, x));
      }
    }
    EXPECT_TRUE(a.dlse.empty());
  }
}

TEST_P(EveryInput, TakesAnyLengths) {
  for (const auto& [m, n] : {std::pair(1, 1), {1, 300}, {300, 1}, {49, 51}}) {
    const Inputs in = make(GetParam(), {1, 2, 1, m, n});
    EXPECT_EQ(in.q.size(), size_t(2) * m * kChannels);
    EXPECT_EQ(in.k.size(), size_t(n) * kChannels);
    EXPECT_TRUE(std::all_of(in.k.begin(), in.k.end(), [](float x) { return std::isfinite(x); }));
  }
}

TEST_P(EveryInput, HasParametersOnlyWhereGaussian) {
  const auto draw = [](const InputKind& kind, int channels) {
    return named_inputs(kind, {1, 1, 1, 4, 4}, channels, DType::bf16, 0);
  };
  if (GetParam() == Distribution::gaussian) {
    EXPECT_NO_THROW(draw({GetParam(), 3, 20}, kChannels));
  } else {
    EXPECT_THROW(draw({GetParam(), 3, 0}, kChannels), SpecError);
    EXPECT_THROW(draw({GetParam(), 1, 20}, kChannels), SpecError);
  }
  const int least = facts_of(GetParam()).least_channels;
  EXPECT_NO_THROW(draw({GetParam()}, least));
  if (least > 1) {
    EXPECT_THROW(draw({GetParam()}, least - 1), SpecError);
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, EveryInput, testing::ValuesIn([] {
                           std::vector<Distribution> all;
                           for (const auto& [distribution, name] : Words<Distribution>::all)
                             all.push_back(distribution);
                           return all;
                         }()),
                         [](const testing::TestParamInfo<Distribution>& info) {
                           std::string name(to_string(info.param));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(NamedInputs, GaussianHasItsSigmaAndOffset) {
  const Inputs in =
      named_inputs({Distribution::gaussian, 3, 20}, kProblem, kChannels, DType::bf16, 1);
  EXPECT_NEAR(moments_of(in.q).deviation, 3, 0.05);
  EXPECT_NEAR(moments_of(in.v).deviation, 1, 0.02);
  EXPECT_NEAR(channel(in.k, 6).mean, 20, 0.4);
  EXPECT_NEAR(channel(in.k, 7).mean, -20, 0.4);
  EXPECT_EQ(in.q, random_inputs(kProblem, kChannels, DType::bf16, 3, 1).q);
}

TEST(NamedInputs, OutlierChannels) {
  const Inputs in = make(Distribution::outlier_channels);
  for (double size : sizes_of_rows(in.q))
    ASSERT_NEAR(size, 1, 0.01);
  std::vector<double> logs, offsets;
  for (int c = 0; c < kChannels; ++c) {
    logs.push_back(std::log(channel(in.k, c).deviation));
    offsets.push_back(channel(in.k, c).mean);
  }
  EXPECT_NEAR(moments_of(logs).deviation, 0.8, 0.25);
  EXPECT_NEAR(moments_of(offsets).deviation, 3, 0.9);
  expect_small_gradients(in, 1.5);
}

TEST(NamedInputs, FourHeavyChannelsHaveLargeQueriesAndKeys) {
  const Inputs in = make(Distribution::heavy_channels);
  int heavy = 0;
  for (int c = 0; c < kChannels; ++c) {
    const bool large = channel(in.q, c).deviation > 6;
    heavy += large;
    EXPECT_NEAR(channel(in.q, c).deviation, large ? 12 : 1, large ? 1.5 : 0.15);
    EXPECT_NEAR(channel(in.k, c).mean, large ? 20 : 0, large ? 0.6 : 0.2);
    EXPECT_NEAR(channel(in.k, c).deviation, large ? 3 : 1, large ? 0.4 : 0.15);
  }
  EXPECT_EQ(heavy, 4);
  expect_small_gradients(in, 0);
}

TEST(NamedInputs, TheSinkTakesHalfOfTheMass) {
  const Inputs in = make(Distribution::sink);
  for (double share : {0.35, 0.65}) {
    const std::vector<double> late = mass(in, Causal::top_left, 0, 128);
    const double mean = moments_of(late).mean;
    EXPECT_TRUE(share < 0.5 ? mean > share : mean < share) << mean;
  }
  const std::vector<double> values = sizes_of_rows(in.v);
  EXPECT_NEAR(values[0], 0.05, 0.015);
  EXPECT_GT(*std::min_element(values.begin() + 1, values.begin() + 512), 0.5);
  EXPECT_NEAR(values[512], 0.05, 0.015); // of the next head
  expect_small_gradients(in, 1);
}

TEST(NamedInputs, TheLastKeyAsASink) {
  const Inputs in = make(Distribution::sink_last);
  const double mean = moments_of(mass(in, Causal::none, 511, 512)).mean;
  EXPECT_GT(mean, 0.35);
  EXPECT_LT(mean, 0.65);
  EXPECT_NEAR(sizes_of_rows(in.v)[511], 1, 0.3);
  EXPECT_NEAR(moments_of(in.dout).deviation, 1, 0.02);
}

TEST(NamedInputs, TheFirstKeyOfEachHeadIsThirtyTimesAsLarge) {
  const std::vector<double> keys = sizes_of_rows(make(Distribution::large_first_key).k);
  for (size_t first : {0, 512}) {
    EXPECT_NEAR(keys[first], 30, 9);
    EXPECT_NEAR(keys[first + 1], 1, 0.3);
  }
}

TEST(NamedInputs, LocalScoresFallOffWithTheDistance) {
  const Inputs in = make(Distribution::local);
  const auto score = [&](int64_t query, int64_t key) { // of the waves alone
    double sum = 0;
    for (int c = 0; c < 32; ++c)
      sum += static_cast<double>(in.q[query * kChannels + c]) * in.k[key * kChannels + c];
    return sum / std::sqrt(kChannels);
  };
  EXPECT_NEAR(score(300, 300), 8, 0.1);
  EXPECT_NEAR(score(300, 299), score(299, 300), 0.1);
  EXPECT_LT(score(300, 290), 6.5);
  EXPECT_LT(score(400, 300), score(300, 290) - 0.5);
  expect_small_gradients(in, 1);
}

TEST(NamedInputs, QkNormHasItsGain) {
  const Inputs three = make(Distribution::qk_norm), one = make(Distribution::qk_norm_unit);
  for (size_t i = 0; i < one.q.size(); ++i)
    ASSERT_NEAR(three.q[i], 3 * one.q[i], 0.013 * std::abs(three.q[i]) + 1e-30);
  EXPECT_EQ(three.v, one.v);
  // Keys are of one size, except for the channels' gains.
  const Moments sizes = moments_of(sizes_of_rows(one.k));
  EXPECT_NEAR(sizes.mean, 1.05, 0.2);
  EXPECT_LT(sizes.deviation, 0.15);
  // Values share features: of 16 in 64 channels, each of which has a weight of 1/4.
  EXPECT_NEAR(moments_of(one.v).deviation, std::sqrt(2), 0.2);
  double means = 0; // of keys in one head
  for (int c = 0; c < kChannels; ++c) {
    double mean = 0;
    for (int64_t i = 0; i < 512; ++i)
      mean += one.k[i * kChannels + c] / 512;
    means += mean * mean / kChannels;
  }
  EXPECT_GT(std::sqrt(means), 0.3);
  expect_small_gradients(one, 1);
}

TEST(NamedInputs, QkNormSharesFeaturesWithinAGroupOfHeads) {
  // Queries of heads 0 and 1 read key head 0: their rows have features in common with its values.
  const Inputs in = make(Distribution::qk_norm_unit, {1, 4, 2, 512, 512});
  const auto gram = [](const std::vector<float>& x, int64_t head) {
    std::vector<double> products;
    for (int64_t i = 0; i < 256; ++i)
      for (int64_t j = 0; j < i; ++j) {
        const float* a = x.data() + (head * 512 + i) * kChannels;
        products.push_back(
            std::inner_product(a, a + kChannels, x.data() + (head * 512 + j) * kChannels, 0.0));
      }
    return products;
  };
  const auto correlation = [](const std::vector<double>& a, const std::vector<double>& b) {
    const Moments x = moments_of(a), y = moments_of(b);
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i)
      sum += (a[i] - x.mean) * (b[i] - y.mean) / static_cast<double>(a.size());
    return sum / (x.deviation * y.deviation);
  };
  EXPECT_GT(correlation(gram(in.q, 1), gram(in.v, 0)), 0.05);
  EXPECT_GT(correlation(gram(in.q, 2), gram(in.v, 1)), 0.05);
  EXPECT_LT(std::abs(correlation(gram(in.q, 1), gram(in.v, 1))), 0.025);
}

TEST(NamedInputs, FourMassiveTokensHaveLargeKeysValuesAndGradients) {
  const Inputs in = make(Distribution::massive_tokens);
  const std::vector<double> values = sizes_of_rows(in.v), gradients = sizes_of_rows(in.dout);
  std::vector<int64_t> massive;
  for (int64_t i = 0; i < 512; ++i)
    if (values[i] > 8) {
      massive.push_back(i);
      EXPECT_NEAR(values[i], 20, 6);
      EXPECT_GT(gradients[i], 8);
      EXPECT_GT(in.k[i * kChannels], 9);
      EXPECT_GT(in.k[i * kChannels + 1], 9);
    }
  EXPECT_EQ(massive, (std::vector<int64_t>{12, 192, 320, 462}));
}

TEST(NamedInputs, PaddedTokensAreZerosAndThePromptHasNoGradients) {
  const Inputs in = make(Distribution::padded);
  const std::vector<double> values = sizes_of_rows(in.v), gradients = sizes_of_rows(in.dout);
  for (int64_t i = 0; i < 512; ++i) {
    EXPECT_EQ(values[i] != 0, i < 308) << i;
    EXPECT_EQ(gradients[i] != 0, i >= 102 && i < 308) << i;
  }
  EXPECT_NEAR(gradients[200], 1e-4, 3e-5);
}

TEST(NamedInputs, WhatChannelsHaveInCommon) {
  const Inputs keys = make(Distribution::alternating_keys);
  for (size_t token = 0; token < 2 * 512; ++token) {
    const std::vector<float> row(keys.k.begin() + token * kChannels,
                                 keys.k.begin() + (token + 1) * kChannels);
    ASSERT_NEAR(moments_of(row).mean, token % 2 ? -8 : 8, 0.7);
    ASSERT_NEAR(moments_of(row).deviation, 1, 0.5);
  }
  const Inputs both = make(Distribution::common_offset);
  for (const std::vector<float>* x : {&both.q, &both.k}) {
    EXPECT_NEAR(channel(*x, 9).mean, 4, 0.2);
    EXPECT_NEAR(moments_of(*x).deviation, 1, 0.05);
  }
  EXPECT_NEAR(moments_of(both.v).mean, 0, 0.02);
}

TEST(NamedInputs, NegativeSizesAreRefused) {
  EXPECT_THROW(random_inputs({1, 1, 1, -5, 5}, 64, DType::bf16, 1, 0), SpecError);
}

TEST(NamedInputs, TinyValues) {
  for (const auto& [dtype, size] : {std::pair(DType::bf16, 1e-30), {DType::fp16, 1e-3}}) {
    const Inputs in = make(Distribution::tiny_values, kProblem, 1, dtype);
    EXPECT_NEAR(moments_of(in.v).deviation / size, 1, 0.02);
    EXPECT_NEAR(moments_of(in.dout).deviation, 1, 0.02);
  }
}

} // namespace
