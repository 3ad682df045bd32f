//===- key_mean_test.cpp - A mean of the keys that is handed in ------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <cmath>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

constexpr int kHeads = 4, kHeadsKv = 2;

/// Keys of few bits, whose sums are exact in FP32 in any order, and far from zero.
reference::Inputs inputs_with_mean(const AttentionSpec& spec, int64_t batch, int64_t queries,
                                   int64_t keys) {
  auto in = reference::random_inputs({batch, kHeads, kHeadsKv, queries, keys}, spec.head_dim,
                                     spec.dtype, 1, 9);
  for (float& x : in.k)
    x = std::round(x * 8) / 8 + 2;
  in.dlse.resize(in.q.size() / static_cast<size_t>(spec.head_dim));
  for (size_t i = 0; i < in.dlse.size(); ++i)
    in.dlse[i] = std::sin(static_cast<float>(i) * 1.7f);
  return in;
}

/// (B, Hk, D), as the kernels compute it of such keys.
std::vector<float> mean_of(const reference::Inputs& in) {
  const int64_t n = in.problem.seq_kv, d = in.head_dim;
  std::vector<float> mean(in.k.size() / static_cast<size_t>(n));
  for (size_t i = 0; i < in.k.size(); ++i)
    mean[i / static_cast<size_t>(n * d) * static_cast<size_t>(d) + i % static_cast<size_t>(d)] +=
        in.k[i];
  for (float& x : mean)
    x /= static_cast<float>(n);
  return mean;
}

/// Another one, of each channel and head its own.
std::vector<float> moved(std::vector<float> mean) {
  for (size_t i = 0; i < mean.size(); ++i)
    mean[i] += 0.25f * std::cos(static_cast<float>(i));
  return mean;
}

void expect_same(const Attention& attention, reference::Outputs<float> got,
                 const reference::Outputs<float>& expected) {
  if (!attention.spec()->deterministic) {
    EXPECT_LE(distance(got.dq, expected.dq).relative(), 1e-3);
    got.dq = expected.dq;
  }
  expect_identical(got, expected);
}

class KeyMean : public CaseTest {};

TEST_P(KeyMean, ThatOfTheKeysChangesNoBit) {
  auto in = inputs_with_mean(attention->spec(), 2, 70, 300);
  const auto expected = run(*attention, in);
  in.k_mean = mean_of(in);
  expect_same(*attention, run(*attention, in), expected);
}

TEST_P(KeyMean, AnotherIsTakenOffAndPutBack) {
  auto in = inputs_with_mean(attention->spec(), 1, 150, 300);
  in.k_mean = moved(mean_of(in));
  const auto got = run(*attention, in);
  const auto emulated = emulate_like(attention->spec(), in, got);
  const double limit = grouping_of(attention->spec()->granularity).one_scale ? kBlockEmulationLimit
                                                                             : kEmulationLimit;
  EXPECT_LE(distance(got.o, emulated.o).relative(), limit);
  EXPECT_LE(distance(got.lse, emulated.lse).relative(), limit);
  EXPECT_LE(distance(got.dq, emulated.dq).relative(), limit);
  EXPECT_LE(distance(got.dk, emulated.dk).relative(), limit);
  EXPECT_LE(distance(got.dv, emulated.dv).relative(), limit);
  // lse is that of the scores as they are; and another mean is another rounding.
  EXPECT_LE(distance(got.lse, reference::exact(in, attention->spec()).lse).relative(), 0.002);
  in.k_mean.clear();
  EXPECT_NE(run(*attention, in).dq, got.dq);
}

INSTANTIATE_TEST_SUITE_P(Gpu, KeyMean,
                         testing::ValuesIn(cases_named(
                             {"D128_bf16_Row", "D64_bf16_Row_TopLeft", "D64_bf16_Block",
                              "D128_bf16_Qk16", "D64_fp16_Qk16_TopLeft", "D64_fp16_Gradients16",
                              "D160_bf16_Row", "D256_bf16_Row", "D384_bf16_Row",
                              "Mma_D128_bf16_Row64", "Mma_D64_bf16_Dv16",
                              "Wgmma8Warps_D64_bf16_Row128", "Fused_D64_bf16", "FusedWs_D64_bf16",
                              "Fp16Sums_D64_bf16", "HalfDp_D64_bf16", "D40_bf16_Row_TopLeft"})),
                         case_name);

/// Each of packed sequences has its own, one without keys too.
TEST_F(OnGpu, PackedSequencesHaveKeyMeansOfTheirOwn) {
  AttentionSpec spec{.head_dim = 72, .causal = Causal::top_left};
  const Tiles tiles = mma_tiles(spec); // another tile sums in another order
  Attention alone(spec, 0, tiles);
  spec.packed = true;
  Attention packed(spec, 0, tiles);
  const std::vector<std::pair<int, int>> lengths = {{70, 90}, {33, 0}, {129, 200}};
  const auto d = static_cast<size_t>(spec.head_dim);
  auto in = inputs_with_mean(spec, 1, 70 + 33 + 129, 90 + 200);
  for (size_t i = 0; i < lengths.size() * kHeadsKv * d; ++i)
    in.k_mean.push_back(2 + 0.25f * std::cos(static_cast<float>(i)));
  const auto got = run(packed, in, {.lengths = lengths});

  const auto slice = [](const std::vector<float>& x, size_t heads, size_t first, size_t count) {
    std::vector<float> found;
    const size_t head = x.size() / heads;
    for (size_t h = 0; h < heads; ++h)
      for (size_t i = 0; i < count; ++i)
        found.push_back(x[h * head + first + i]);
    return found;
  };
  size_t first_query = 0, first_key = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto queries = static_cast<size_t>(lengths[i].first);
    const auto keys = static_cast<size_t>(lengths[i].second);
    const auto of_queries = [&](const std::vector<float>& x, size_t channels) {
      return slice(x, kHeads, first_query * channels, queries * channels);
    };
    const auto of_keys = [&](const std::vector<float>& x) {
      return slice(x, kHeadsKv, first_key * d, keys * d);
    };
    const reference::Outputs<float> part{.o = of_queries(got.o, d),
                                         .lse = of_queries(got.lse, 1),
                                         .delta = {},
                                         .dq = of_queries(got.dq, d),
                                         .dk = of_keys(got.dk),
                                         .dv = of_keys(got.dv),
                                         .p = {},
                                         .dp = {},
                                         .ds = {}};
    if (keys == 0) {
      EXPECT_EQ(part.lse, std::vector<float>(part.lse.size(), -INFINITY));
      EXPECT_EQ(part.dq, std::vector<float>(part.dq.size(), 0));
    } else {
      reference::Inputs one = in;
      one.problem.seq_q = lengths[i].first, one.problem.seq_kv = lengths[i].second;
      one.q = of_queries(in.q, d), one.dout = of_queries(in.dout, d);
      one.dlse = of_queries(in.dlse, 1);
      one.k = of_keys(in.k), one.v = of_keys(in.v);
      one.k_mean = slice(in.k_mean, 1, i * kHeadsKv * d, kHeadsKv * d);
      expect_identical(part, run(alone, one));
    }
    first_query += queries, first_key += keys;
  }
}

} // namespace
