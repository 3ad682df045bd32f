//===- max_logits_test.cpp - The largest score of each head ----------------===//
//
// The emulation has the scores that the kernels have, except for the order of a few FP32 sums and
// for the kernels' headroom, which only raises the result. FP64 has scores that are not quantised,
// and a search of its own.
//
//===----------------------------------------------------------------------===//
#include "tests/generator/specs.h"
#include "tests/gpu/listed.h"

#include <cmath>
#include <limits>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

AttentionSpec with_max_logits(AttentionSpec spec) {
  spec.max_logits = true;
  return spec;
}

/// Keys have a mean, which smoothing takes off the scores and the result must have again.
reference::Inputs shifted_inputs(const AttentionSpec& spec, const Problem& p, uint64_t seed = 3) {
  reference::Inputs in = reference::random_inputs(p, spec.head_dim, spec.dtype, 1, seed);
  for (size_t i = 0; i < in.k.size(); ++i)
    in.k[i] = reference::round_to(spec.dtype, in.k[i] + (i % spec.head_dim % 3 == 0 ? 0.4f : 0));
  return in;
}

/// The largest of softmax_scale q k of each head in FP64, over the keys that lists and the mask
/// show, in plain loops.
std::vector<double> searched(const AttentionSpec& spec, const reference::Inputs& in) {
  const Problem& p = in.problem;
  const MaskEdges edges = mask_edges(spec, p.seq_q, p.seq_kv);
  const double scale = in.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(in.head_dim)));
  const int64_t d = in.head_dim, lists = is_sparse(spec) ? lists_of(spec, p) : 0;
  std::vector<double> found(static_cast<size_t>(p.heads), kNothing);
  for (int64_t bh = 0; bh < p.batch * p.heads; ++bh)
    for (int64_t i = 0; i < p.seq_q; ++i)
      for (int64_t j = std::max<int64_t>(0, i + edges.first); j < p.seq_kv && j <= i + edges.last;
           ++j) {
        if (lists &&
            !in.listed[static_cast<size_t>((bh * lists + i / spec.sparse_q) * blocks_of(spec, p) +
                                           j / spec.sparse_kv)])
          continue;
        const int64_t kv = bh / p.heads * p.heads_kv + bh % p.heads / (p.heads / p.heads_kv);
        double sum = 0;
        for (int64_t c = 0; c < d; ++c)
          sum += double{in.q[static_cast<size_t>((bh * p.seq_q + i) * d + c)]} *
                 in.k[static_cast<size_t>((kv * p.seq_kv + j) * d + c)];
        double& largest = found[static_cast<size_t>(bh % p.heads)];
        largest = std::max(largest, scale * sum);
      }
  return found;
}

/// `tolerance` is relative to 1 and the number together.
template <typename T>
void expect_near(const std::vector<float>& got, const std::vector<T>& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t h = 0; h < got.size(); ++h)
    if (std::isfinite(expected[h]))
      EXPECT_NEAR(got[h], expected[h], tolerance * (1 + std::abs(expected[h]))) << "head " << h;
    else
      EXPECT_EQ(got[h], static_cast<float>(expected[h])) << "head " << h;
}
/// A score of INT8 products is off by about 1.5 % of what scores are.
constexpr double kOfExact = 0.05;

class MaxLogits : public CaseTest {
protected:
  void start(const Arch&) override {
    attention.emplace(with_max_logits(GetParam().spec), 0, GetParam().tiles);
    plain.emplace(GetParam().spec, 0, GetParam().tiles);
  }
  const AttentionSpec& spec() const { return attention->spec(); }

  void check(const reference::Inputs& in) {
    const auto got = run(*attention, in);
    const auto emulated = emulate_like(spec(), in, got).max_logits;
    expect_near(got.max_logits, emulated, 1e-5 + headroom(in));
    for (size_t h = 0; h < emulated.size(); ++h)
      if (std::isfinite(emulated[h]))
        EXPECT_GE(got.max_logits[h], emulated[h] - 1e-5 * (1 + std::abs(emulated[h]))) << h;
    expect_near(got.max_logits, searched(spec(), in), kOfExact);
    if (spec().deterministic) {
      EXPECT_EQ(got.max_logits, run(*attention, in).max_logits);
      const auto without = run(*plain, in);
      if (GetParam().tiles && GetParam().tiles->begin()->second.family == Family::mma)
        expect_other_roundings(got, without);
      else
        expect_identical(got, without);
    }
  }

  /// Two steps of a score's INT32 sum, of rows with the largest scales that there can be. A rotated
  /// vector is as long, and its largest channel no larger than it is long.
  double headroom(const reference::Inputs& in) const {
    const auto longest = [&](const std::vector<float>& x) {
      double found = 0;
      for (size_t row = 0; row < x.size(); row += static_cast<size_t>(in.head_dim)) {
        double sum = 0;
        for (size_t c = row; c < row + static_cast<size_t>(in.head_dim); ++c)
          sum += double{x[c]} * x[c];
        found = std::max(found, sum);
      }
      return std::sqrt(found) / 127;
    };
    const double scale =
        std::abs(in.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(in.head_dim))));
    return 2 * scale * longest(in.q) * longest(in.k);
  }

  /// mma.sync's kernels without max_logits round some products of maxima together with the sums
  /// behind them, as ptxas likes, and those with it do not (softmax.cuh).
  void expect_other_roundings(const reference::Outputs<float>& got,
                              const reference::Outputs<float>& plain_ones) const {
    ASSERT_EQ(got.o.size(), plain_ones.o.size());
    double difference = 0, size = 0;
    for (size_t i = 0; i < got.o.size(); ++i) {
      difference += std::pow(double{got.o[i]} - plain_ones.o[i], 2);
      size += std::pow(double{plain_ones.o[i]}, 2);
    }
    EXPECT_LE(difference, size * 1e-6); // 8 bits cost about a hundredth
    expect_near(got.lse, plain_ones.lse, 1e-6);
  }

  std::optional<Attention> plain; ///< the same without max_logits
};

TEST_P(MaxLogits, NearTheEmulationAndFp64) {
  check(shifted_inputs(spec(), {2, 4, 2, 300, 500}));
  check(shifted_inputs(spec(), {1, 3, 1, 330, 200}));
}

TEST_P(MaxLogits, OddLengths) {
  for (const auto& [m, n] : {std::pair{1, 1}, {1, 63}, {65, 129}, {257, 65}}) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    check(shifted_inputs(spec(), {1, 2, 1, m, n}));
  }
}

/// All scores are negative, and of some heads they are large: neither zeros of padding nor other
/// heads' scores count.
TEST_P(MaxLogits, NegativeScores) {
  auto in = shifted_inputs(spec(), {2, 2, 2, 70, 90});
  for (size_t i = 0; i < in.q.size(); ++i)
    in.q[i] = reference::round_to(spec().dtype, 2 + std::abs(in.q[i]) / 8);
  for (size_t i = 0; i < in.k.size(); ++i)
    in.k[i] = reference::round_to(spec().dtype, -1 - std::abs(in.k[i]) / 8);
  for (const float score : run(*attention, in).max_logits)
    EXPECT_LT(score, -10);
  check(in);
}

/// Wherever a head's largest score lies, in whichever of its groups, rows and warps, it is found.
TEST_P(MaxLogits, OneLargeScoreAnywhere) {
  constexpr int64_t m = 200, n = 300;
  const bool causal = spec().causal != Causal::none;
  for (const auto& [query, key] : {std::pair<int64_t, int64_t>{199, 0},
                                   {150, 1},
                                   {131, 64},
                                   {199, 99},
                                   {67, 40},
                                   {0, 0},
                                   {180, 127},
                                   {10, 299}}) {
    if ((causal || bounded_behind(spec())) && key > query)
      continue;
    if (bounded_before(spec()) && key < query - 10)
      continue;
    SCOPED_TRACE("query " + std::to_string(query) + ", key " + std::to_string(key));
    auto in = shifted_inputs(spec(), {1, 2, 1, m, n});
    const int64_t d = in.head_dim;
    for (int64_t c = 0; c < d; ++c) { // of the second head
      const float x = c % 2 ? 2.0f : -2.0f;
      in.q[static_cast<size_t>((m + query) * d + c)] = x;
      in.k[static_cast<size_t>(key * d + c)] = x;
    }
    check(in);
    EXPECT_GT(run(*attention, in).max_logits[1], 3.9 * std::sqrt(static_cast<double>(d)));
  }
}

TEST_P(MaxLogits, NanStaysInItsHead) {
  auto in = shifted_inputs(spec(), {1, 4, 2, 150, 150});
  const auto clean = run(*attention, in);
  in.q[static_cast<size_t>((150 + 140) * in.head_dim + 5)] =
      std::numeric_limits<float>::quiet_NaN(); // of the second head
  const auto got = run(*attention, in);
  EXPECT_TRUE(std::isnan(got.max_logits[1]));
  for (size_t head : {2, 3})
    EXPECT_EQ(got.max_logits[head], clean.max_logits[head]);
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, MaxLogits,
    testing::ValuesIn(
        cases_named({"D64_fp16_Row", "D64_bf16_Row_TopLeft", "D128_bf16_Row", "D64_bf16_Block",
                     "D64_fp16_Qk16_TopLeft", "D128_bf16_Row64", "D64_bf16_Row_TopLeft_NoSink",
                     "D128_bf16_Row_Unsmoothed", "D80_fp16_Row", "D256_bf16_Row",
                     "Mma_D64_fp16_Row_TopLeft", "Mma_D128_bf16_Row64", "Mma_D128_bf16_Block",
                     "SmoothQ_D64_bf16_Row_TopLeft", "Window_D64_bf16", "FusedWs_D64_bf16"})),
    case_name);

class MaxLogitsOfLists : public MaxLogits {};

TEST_P(MaxLogitsOfLists, CountListedKeysAlone) {
  for (const double density : {0.05, 0.4}) {
    auto in = shifted_inputs(spec(), {2, 2, 1, 500, 600});
    in.listed = reference::random_lists(spec(), in.problem, density, 5);
    check(in);
  }
  auto in = shifted_inputs(spec(), {2, 2, 1, 300, 300});
  in.listed.assign(
      static_cast<size_t>(4 * lists_of(spec(), in.problem) * blocks_of(spec(), in.problem)), 0);
  const auto got = run(*attention, in);
  EXPECT_EQ(got.max_logits, std::vector<float>(2, kNothing));
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, MaxLogitsOfLists,
    testing::ValuesIn(sparse_cases({"D64_bf16_128x64", "D64_bf16_128x128_BottomRight_Ws",
                                    "D64_fp16_128x64_BottomRight_Mma", "D64_bf16_64x128_Qk16"})),
    case_name);

class MaxLogitsBeside : public OnGpu {};

/// Each head has the largest of all sequences, of which some have no queries or no keys.
TEST_F(MaxLogitsBeside, PackedSequences) {
  const std::vector<std::pair<int, int>> lengths = {{70, 70}, {0, 40}, {300, 300}, {33, 0}, {1, 1}};
  for (const bool causal : {false, true}) {
    AttentionSpec spec{.head_dim = 64, .packed = true};
    spec.causal = causal ? Causal::top_left : Causal::none;
    Attention attention(with_max_logits(spec), 0);
    const auto in = shifted_inputs(spec, {1, 2, 1, 404, 411});
    const auto got = run(attention, in, {.layout = {.bshd = true}, .lengths = lengths});
    std::vector<double> expected(2, kNothing);
    int64_t first_query = 0, first_key = 0;
    spec.packed = false;
    for (const auto& [queries, keys] : lengths) {
      reference::Inputs part = in;
      part.problem.seq_q = queries, part.problem.seq_kv = keys;
      part.q.clear(), part.k.clear();
      for (int64_t h = 0; h < 2; ++h)
        part.q.insert(part.q.end(), in.q.begin() + (h * 404 + first_query) * 64,
                      in.q.begin() + (h * 404 + first_query + queries) * 64);
      part.k.assign(in.k.begin() + first_key * 64, in.k.begin() + (first_key + keys) * 64);
      const std::vector<double> found = searched(spec, part);
      for (size_t h = 0; h < 2; ++h)
        expected[h] = std::max(expected[h], found[h]);
      first_query += queries, first_key += keys;
    }
    expect_near(got.max_logits, expected, kOfExact);
  }
}

TEST_F(MaxLogitsBeside, AScoreFunction) {
  AttentionSpec spec{.head_dim = 64};
  spec.score = "2.0 * tanh(s / 2.0)";
  Attention attention(with_max_logits(spec), 0);
  auto in = shifted_inputs(spec, {1, 2, 1, 200, 200});
  in.score = reference::score_by_spec(attention.spec(), {});
  const auto got = run(attention, in);
  std::vector<double> expected = searched(AttentionSpec{.head_dim = 64}, in);
  for (double& score : expected)
    score = 2 * std::tanh(score / 2);
  expect_near(got.max_logits, expected, kOfExact);
}

TEST_F(MaxLogitsBeside, AMaskThatHidesAllKeysOfAHead) {
  AttentionSpec spec{.head_dim = 64};
  spec.mask = "h == 0 & q - k < 20";
  Attention attention(with_max_logits(spec), 0);
  auto in = shifted_inputs(spec, {1, 2, 1, 200, 200});
  in.seen = reference::seen_by_mask(attention.spec(), in.problem, {});
  const auto got = run(attention, in);
  AttentionSpec window{.head_dim = 64};
  window.window_left = 19;
  const std::vector<double> expected = searched(window, in);
  expect_near({got.max_logits[0]}, std::vector<double>{expected[0]}, kOfExact);
  EXPECT_EQ(got.max_logits[1], kNothing);
}

TEST_F(MaxLogitsBeside, OneAddressForEachSpec) {
  Attention with(with_max_logits({.head_dim = 64}), 0), without({.head_dim = 64}, 0);
  const auto in = shifted_inputs({.head_dim = 64}, {1, 2, 1, 64, 64});
  Operands given(with, in), lacking(without, in);
  lacking.forward.max_logits = given.forward.max_logits;
  expect_refusal([&] { without.forward(lacking.forward); },
                 {"max_logits are given", "take a spec with max_logits"});
  given.forward.max_logits = nullptr;
  expect_refusal([&] { with.forward(given.forward); },
                 {"max_logits: the address is null", "(heads) floats"});
  given.forward.max_logits = given.lse.as<float>();
  expect_refusal([&] { with.forward(given.forward); }, {"max_logits", "lse"});
}

} // namespace
