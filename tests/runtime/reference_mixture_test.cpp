//===- reference_mixture_test.cpp - SLA2's attention on the CPU -------------===//
#include "runtime/reference/mixture.h"

#include "gtest/gtest.h"

#include <cmath>

using namespace sagebwd;
using namespace sagebwd::reference;

namespace {

constexpr int kMixedChannels = 64, kMixedQueries = 140, kMixedKeys = 150, kListBlock = 64;

AttentionSpec mixed_spec(LinearKeys linear, bool smooth_k) {
  AttentionSpec spec{.head_dim = kMixedChannels, .smooth_k = smooth_k};
  spec.sparse_q = spec.sparse_kv = kListBlock;
  spec.linear = linear;
  return resolved(spec);
}

/// Two heads share keys; the first list is empty, the second has all blocks.
Inputs mixed_inputs(bool of_rest) {
  Inputs in =
      random_inputs({1, 2, 1, kMixedQueries, kMixedKeys}, kMixedChannels, DType::bf16, 1, 3);
  in.listed = {0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1};
  in.of_rest = of_rest;
  for (int row = 0; row < 2 * kMixedQueries; ++row)
    in.shares.push_back(of_rest ? 4 + 0.01f * static_cast<float>(row % 90)
                                : 0.2f + 0.005f * static_cast<float>(row % 90));
  return in;
}

double loss_of_mixture(const Inputs& in, const AttentionSpec& spec) {
  const Outputs<double> found = exact_mixture(in, spec);
  double sum = 0;
  for (size_t i = 0; i < found.o.size(); ++i)
    sum += found.o[i] * in.dout[i];
  return sum;
}

struct MixtureCase {
  const char* name;
  LinearKeys linear;
  bool smooth_k, of_rest;
};
class ReferenceMixture : public testing::TestWithParam<MixtureCase> {};

/// By each key's own weight.
TEST_P(ReferenceMixture, OutputsAreTheFormula) {
  const auto [name, linear, smooth_k, of_rest] = GetParam();
  const AttentionSpec spec = mixed_spec(linear, smooth_k);
  const Inputs in = mixed_inputs(of_rest);
  const Outputs<double> found = exact_mixture(in, spec);
  const auto phi = [&](const float* row, const std::vector<double>& mean) {
    std::vector<double> x(kMixedChannels);
    double sum = 0;
    for (int c = 0; c < kMixedChannels; ++c)
      sum += x[c] = std::exp(row[c] - mean[c]);
    for (double& value : x)
      value /= sum;
    return x;
  };
  std::vector<double> none(kMixedChannels), mean(kMixedChannels);
  for (size_t i = 0; i < in.k.size() && smooth_k; ++i)
    mean[i % kMixedChannels] += in.k[i] / double{kMixedKeys};
  for (const int row : {5, 70, 139, 140, 210, 275}) {
    const int list = row / kMixedQueries * 3 + row % kMixedQueries / kListBlock;
    const std::vector<double> f = phi(&in.q[row * kMixedChannels], none);
    double exact = 0, beside = 0;
    std::vector<double> of_exact(kMixedChannels), of_linear(kMixedChannels);
    for (int key = 0; key < kMixedKeys; ++key) {
      const bool listed = in.listed[list * 3 + key / kListBlock];
      const std::vector<double> g = phi(&in.k[key * kMixedChannels], mean);
      double score = 0, weight = 0;
      for (int c = 0; c < kMixedChannels; ++c) {
        score += double{in.q[row * kMixedChannels + c]} * in.k[key * kMixedChannels + c] / 8;
        weight += f[c] * g[c];
      }
      const double e = listed ? std::exp(score) : 0;
      const double w = !listed || linear == LinearKeys::all ? weight : 0;
      exact += e, beside += w;
      for (int c = 0; c < kMixedChannels; ++c) {
        of_exact[c] += e * in.v[key * kMixedChannels + c];
        of_linear[c] += w * in.v[key * kMixedChannels + c];
      }
    }
    const double given = of_rest ? exact / (exact + std::exp(in.shares[row])) : in.shares[row];
    const double share = exact == 0 ? 0 : beside == 0 ? 1 : given;
    for (int c = 0; c < kMixedChannels; ++c)
      EXPECT_NEAR(found.o[row * kMixedChannels + c],
                  (exact == 0 ? 0 : share * of_exact[c] / exact) +
                      (beside == 0 ? 0 : (1 - share) * of_linear[c] / beside),
                  1e-6);
  }
}

TEST_P(ReferenceMixture, GradientsAreDifferences) {
  const auto [name, linear, smooth_k, of_rest] = GetParam();
  const AttentionSpec spec = mixed_spec(linear, smooth_k);
  const Inputs in = mixed_inputs(of_rest);
  const Outputs<double> found = exact_mixture(in, spec);
  const auto expect = [&](std::vector<float> Inputs::*tensor, const std::vector<double>& gradient,
                          size_t step, const char* what) {
    ASSERT_EQ(gradient.size(), (in.*tensor).size());
    for (size_t i = step / 3; i < gradient.size(); i += step) {
      Inputs more = in, less = in;
      constexpr float kStep = 1.0f / 64;
      (more.*tensor)[i] += kStep, (less.*tensor)[i] -= kStep;
      const double difference =
          (loss_of_mixture(more, spec) - loss_of_mixture(less, spec)) / (2 * kStep);
      EXPECT_NEAR(gradient[i], difference, 1e-3 * std::abs(difference) + 2e-4) << what << " " << i;
    }
  };
  expect(&Inputs::q, found.dq, 2 * kMixedQueries * kMixedChannels / 4, "q");
  expect(&Inputs::k, found.dk, kMixedKeys * kMixedChannels / 4, "k");
  expect(&Inputs::v, found.dv, kMixedKeys * kMixedChannels / 4, "v");
  expect(&Inputs::shares, found.dshares, 2 * kMixedQueries / 6, "shares");
}

TEST(ReferenceMixture, NeedsAShareOfEachQuery) {
  Inputs in = mixed_inputs(false);
  in.shares.pop_back();
  EXPECT_THROW(exact_mixture(in, mixed_spec(LinearKeys::all, true)), SpecError);
}

INSTANTIATE_TEST_SUITE_P(
    Cpu, ReferenceMixture,
    testing::Values(MixtureCase{"complement", LinearKeys::complement, true, false},
                    MixtureCase{"all_unsmoothed", LinearKeys::all, false, false},
                    MixtureCase{"complement_of_rest", LinearKeys::complement, true, true}),
    [](const auto& info) { return std::string(info.param.name); });

} // namespace
