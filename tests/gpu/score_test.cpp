//===- score_test.cpp - Score functions -------------------------------------===//
#include "tests/gpu/listed.h"

#include "generator/pointwise.h"

#include <cmath>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using reference::Inputs;
using reference::Scored;

/// A score function as its text, and as C++ says it with its derivative.
struct NamedScore {
  std::string text;
  std::vector<reference::TableOfNumbers> tables;
  reference::ScoreFunction function;
};

constexpr float kSlopes[] = {0.02f, 0.005f, 0.001f};

NamedScore score_named(const std::string& name) {
  if (name == "Softcap")
    return {"6.0 * tanh(s / 6.0)", {}, [](const Point&, double s) {
              const double capped = std::tanh(s / 6);
              return Scored{6 * capped, 1 - capped * capped};
            }};
  if (name == "Alibi") // heads beyond have the last slope
    return {"s + slope[h] * (k - q)",
            {reference::table_of_floats(1, 3, {std::begin(kSlopes), std::end(kSlopes)})},
            [](const Point& at, double s) {
              return Scored{s + kSlopes[std::min(at.h, 2)] * (at.k - at.q), 1.0};
            }};
  if (name == "Bias") { // by distance, of each head
    std::vector<float> bias;
    for (int i = 0; i < 4 * 65; ++i)
      bias.push_back(static_cast<float>(std::sin(i)));
    return {"s + bias[h, min(max(k - q, -32), 32) + 32]",
            {reference::table_of_floats(4, 65, bias)},
            [bias](const Point& at, double s) {
              const int column = std::clamp(at.k - at.q, -32, 32) + 32;
              return Scored{s + bias[static_cast<size_t>(at.h * 65 + column)], 1.0};
            }};
  }
  if (name == "Temperature") // of each query
    return {"s * (1.0 + q / 500.0)", {}, [](const Point& at, double s) {
              return Scored{s * (1 + at.q / 500.0), 1 + at.q / 500.0};
            }};
  return {"where(q > k, 0.5 * s, s) + sigmoid(s)", {}, [](const Point& at, double s) {
            const double x = 1 / (1 + std::exp(-s));
            return Scored{(at.q > at.k ? s / 2 : s) + x, (at.q > at.k ? 0.5 : 1) + x * (1 - x)};
          }};
}

std::string last_word(const std::string& name) { return name.substr(name.rfind('_') + 1); }

/// Keys have a mean, which smoothing must give back to a function that bends scores.
Inputs inputs_with(const NamedScore& score, const AttentionSpec& spec, const Problem& p) {
  Inputs in = reference::random_inputs(p, spec.head_dim, spec.dtype, 1, 3);
  for (size_t i = 0; i < in.k.size(); ++i)
    in.k[i] = reference::round_to(spec.dtype, in.k[i] + (i % spec.head_dim % 3 == 0 ? 0.4f : 0));
  in.tables = score.tables;
  in.score = score.function;
  return in;
}

/// Names end with that of their score function.
std::vector<Case> score_cases() {
  using enum DType;
  using enum Granularity;
  using enum Precision;
  constexpr Causal none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  const std::pair<const char*, AttentionSpec> all[] = {
      {"D64_bf16_Softcap", {64, bf16, none, row}},
      {"D64_fp16_TopLeft_Mma_Softcap", {64, fp16, top, row}},
      {"D64_bf16_Alibi", {64, bf16, none, row}},
      {"D64_bf16_BottomRight_Mma_Bias", {64, bf16, bottom, row}},
      {"D64_bf16_Gradients16_Softcap", {64, bf16, none, row, gradients16}},
      {"D64_fp16_Qk16_TopLeft_Softcap", {64, fp16, top, row, qk16}},
      {"D64_bf16_Dv16_Branched", {64, bf16, none, row, dv16}},
      {"D64_bf16_Unsmoothed_Softcap", {64, bf16, none, row, six_of_seven, false}},
      {"D128_bf16_TopLeft_Softcap", {128, bf16, top, row}},
      {"D128_bf16_Mma_Branched", {128, bf16, none, row}},
      {"D128_bf16_Gradients16_Mma_Temperature", {128, bf16, none, row, gradients16}},
      {"D72_fp16_Temperature", {72, fp16, none, row}},
      {"D256_bf16_TopLeft_Softcap", {256, bf16, top, row}},
      {"D256_bf16_Mma_Alibi", {256, bf16, none, row}},
  };
  std::vector<Case> cases;
  for (const auto& [name, spec] : all) {
    Case c{name, spec, {}};
    c.spec.score = score_named(last_word(c.name)).text;
    if (c.name.find("Mma") != std::string::npos)
      c.tiles = mma_tiles(c.spec);
    cases.push_back(c);
  }
  return cases;
}

class WithScore : public CaseTest {
protected:
  const AttentionSpec& spec() const { return attention->spec(); }
  Inputs inputs(const Problem& p) const {
    return inputs_with(score_named(last_word(GetParam().name)), spec(), p);
  }
};

TEST_P(WithScore, NearExactAndEmulated) {
  for (const Problem& p : {Problem{1, 4, 2, 400, 500}, Problem{2, 2, 2, 330, 300}}) {
    const Inputs in = inputs(p);
    expect_close(spec(), in, run(*attention, in));
  }
}

TEST_P(WithScore, OddLengths) {
  for (const auto& [m, n] : {std::pair{1, 63}, {65, 129}, {300, 65}}) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    const Inputs in = inputs({1, 2, 1, m, n});
    expect_close(spec(), in, run(*attention, in), /*few=*/true);
  }
}

TEST_P(WithScore, GradientThroughLse) {
  Inputs in = inputs({1, 2, 1, 200, 260});
  for (int64_t i = 0; i < in.problem.batch * in.problem.heads * in.problem.seq_q; ++i)
    in.dlse.push_back(static_cast<float>(std::cos(i)));
  expect_close(spec(), in, run(*attention, in));
}

INSTANTIATE_TEST_SUITE_P(Gpu, WithScore, testing::ValuesIn(score_cases()), case_name);

/// Beside other masks than a causal one, with lists, and for packed sequences, whose queries and
/// keys count from their own first ones.
class ScoreBeside : public OnGpu {};

TEST_F(ScoreBeside, AMaskThatReadsTables) {
  AttentionSpec spec{.head_dim = 64};
  spec.mask = "doc[q] == doc[k]";
  const NamedScore score = score_named("Alibi");
  spec.score = score.text;
  Attention attention(spec, 0);
  const Problem p = {1, 4, 2, 300, 300};
  Inputs in = inputs_with(score, attention.spec(), p);
  reference::TableOfNumbers doc{1, 300, {}};
  for (int i = 0; i < 300; ++i)
    doc.numbers.push_back(i / 110);
  in.tables.insert(in.tables.begin(), doc);
  for (int64_t h = 0; h < p.heads; ++h)
    for (int q = 0; q < 300; ++q)
      for (int k = 0; k < 300; ++k)
        in.seen.push_back(q / 110 == k / 110);
  expect_close(attention.spec(), in, run(attention, in));
}

TEST_F(ScoreBeside, AWindow) {
  AttentionSpec spec{.head_dim = 128};
  spec.window_left = 100, spec.causal = Causal::top_left;
  const NamedScore score = score_named("Softcap");
  spec.score = score.text;
  Attention attention(spec, 0);
  const Inputs in = inputs_with(score, attention.spec(), {1, 2, 1, 400, 400});
  expect_close(attention.spec(), in, run(attention, in));
}

TEST_F(ScoreBeside, PackedSequences) {
  AttentionSpec spec{.head_dim = 64, .causal = Causal::top_left};
  const NamedScore score = score_named("Branched");
  spec.score = score.text;
  const Tiles tiles = mma_tiles(spec);
  Attention alone(spec, 0, tiles);
  spec.packed = true;
  Attention packed(spec, 0, tiles);
  const Inputs in = inputs_with(score, alone.spec(), {1, 2, 2, 260, 260});
  const auto got = run(packed, in, {.lengths = {{170, 170}, {90, 90}}});
  int64_t first = 0;
  for (const int64_t length : {170, 90}) {
    Inputs own = in;
    own.problem = {1, 2, 2, length, length};
    const auto slice = [&](const std::vector<float>& x) {
      std::vector<float> found;
      for (int64_t h = 0; h < 2; ++h) {
        const auto from = x.begin() + (h * 260 + first) * 64;
        found.insert(found.end(), from, from + length * 64);
      }
      return found;
    };
    for (auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout})
      own.*tensor = slice(in.*tensor);
    const auto wanted = run(alone, own);
    EXPECT_EQ(slice(got.o), wanted.o);
    EXPECT_EQ(slice(got.dq), wanted.dq);
    EXPECT_EQ(slice(got.dk), wanted.dk);
    EXPECT_EQ(slice(got.dv), wanted.dv);
    first += length;
  }
}

/// More sequences than a launch has would count from each launch's first one, and positions that
/// are no floats would be rounded.
TEST_F(ScoreBeside, SizesThatAreRefused) {
  const auto refused = [](const char* score, const Problem& problem, const char* why) {
    AttentionSpec spec{.head_dim = 64};
    spec.score = score;
    Attention attention(spec, 0);
    try {
      attention.prepare(ForwardArgs{.problem = problem, .softmax_scale = 1});
      ADD_FAILURE() << "it is accepted: " << score;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused("s + slope[b]", {65536, 1, 1, 8, 8}, "depends on b: 65535 sequences");
  refused("tanh(s)", {1, 1, 1, 8, (1 << 24) + 1}, "sequences of 16777217 tokens are not supported");
}

/// The expression and its derivative say the same to the CPU, whose evaluator verify and the tools
/// use.
TEST(ScoreEvaluated, IsTheFunctionAndItsDerivative) {
  for (const char* name : {"Softcap", "Alibi", "Bias", "Temperature", "Branched"}) {
    const NamedScore score = score_named(name);
    AttentionSpec spec;
    spec.score = score.text;
    const auto evaluated = reference::score_by_spec(*resolved(spec), score.tables);
    for (int i = 0; i < 200; ++i) {
      const Point at = {0, i % 4, i * 7 % 90, i * 13 % 110};
      const double s = i % 17 - 8.25;
      const Scored found = evaluated(at, s), right = score.function(at, s);
      EXPECT_NEAR(found.value, right.value, 1e-6) << name;
      EXPECT_NEAR(found.slope, right.slope, 1e-6) << name;
    }
  }
}

} // namespace
