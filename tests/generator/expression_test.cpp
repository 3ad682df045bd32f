//===- expression_test.cpp - The language of masks and score functions ------===//

#include "generator/expression.h"
#include "tests/generator/expressions.h"

#include <gtest/gtest.h>

using namespace sagebwd;

namespace {

const OperandTypes kTypes = {{"doc", {ValueType::integer, 2}},
                             {"rank", {ValueType::integer, 1}},
                             {"bias", {ValueType::real, 2}},
                             {"slope", {ValueType::real, 1}}};

std::string canonical_mask(const std::string& text) { return to_string(parse_mask(text, &kTypes)); }
std::string canonical_score(const std::string& text) {
  return to_string(parse_score(text, &kTypes));
}
/// The value of an expression of b = 1, h = 2, q = 7 and k = 3.
double value_of_int(const std::string& text) {
  for (int32_t value : {0, 1, -1, 2, -2, 3, 4, 5, 6, 7, 10, INT32_MIN, INT32_MAX})
    if (evaluate(parse_mask(text + " == " + std::to_string(value)), {1, 2, 7, 3, 0}) != 0)
      return value;
  return NAN;
}
TEST(Expression, MasksHaveOneCanonicalText) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"q>=k", "q >= k"},
      {"  ( q>=k )  ", "q >= k"},
      {"(q >= k) | (doc[b,q] == doc[(b),k])", "q >= k | doc[b, q] == doc[b, k]"},
      {"(q > k | q < 5) & h == 0", "(q > k | q < 5) & h == 0"},
      {"q > k | (q < 5 & h == 0)", "q > k | q < 5 & h == 0"},
      {"(q > k ^ q < 5) & h == 0 ^ true", "(q > k ^ q < 5) & h == 0 ^ true"},
      {"(q > k | q < 5) | b == 0", "q > k | q < 5 | b == 0"},
      {"q > k | (q < 5 | b == 0)", "q > k | (q < 5 | b == 0)"},
      {"(q - k) - 3 < (4)", "q - k - 3 < 4"},
      {"q - (k - 3) < 4", "q - (k - 3) < 4"},
      {"q * (k + 1) // (2 * 4) == (q % 8)", "q * (k + 1) // 8 == q % 8"},
      {"(q * k) // 2 == q * (k // 2)", "q * k // 2 == q * (k // 2)"},
      {"~(q == k)", "~(q == k)"},
      {"~~(q == k)", "~~(q == k)"},
      {"-(q) == -(-k)", "-q == --k"},
      {"-(q + k) == (-q) + k", "-(q + k) == -q + k"},
      {"q - -1 == -1 - q", "q - -1 == -1 - q"},
      {"-2147483648<q", "-2147483648 < q"},
      {"min( q,k )<abs(q-k)", "min(q, k) < abs(q - k)"},
      {"where(b==0,q>k,q<k)", "where(b == 0, q > k, q < k)"},
      {"rank[doc[b,rank[q]]]==1", "rank[doc[b, rank[q]]] == 1"},
      {"float(q) * 1.5 > k", "q * 1.5 > k"},
      {"float(q) > float(k)", "float(q) > k"},
      {"q > float(k)", "float(q) > k"},
      {"-float(q) > 1", "-float(q) > 1.0"},
      {"abs(float(q)) > 1", "abs(float(q)) > 1.0"},
      {"float(float(q)) / float(k) > 0.5", "q / k > 0.5"},
      {"tanh(float(q + k)) > 0.5", "tanh(q + k) > 0.5"},
      {"where(b == 0, float(q), float(k)) > 0.5", "where(b == 0, float(q), k) > 0.5"},
      {"where(b == 0, float(q), bias[b, k]) > 0.5", "where(b == 0, q, bias[b, k]) > 0.5"},
      {"pow(float(q), 2) > k", "pow(q, 2.0) > k"},
  };
  for (const auto& [text, canonical] : kTexts) {
    EXPECT_EQ(canonical_mask(text), canonical) << text;
    EXPECT_EQ(canonical_mask(canonical), canonical);
    EXPECT_EQ(parse_mask(text, &kTypes), parse_mask(canonical, &kTypes));
  }
}

TEST(Expression, LiteralsAreRoundedToFp32AndPrintedShortly) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"1.0", "1.0"},
      {"0.10", "0.1"},
      {"0.1000000001", "0.1"},
      {"16777217.0", "16777216.0"},
      {"100000.0", "1e+05"},
      {"1e+30", "1e+30"},
      {"1E-5", "1e-05"},
      {"1e-45", "1e-45"},
      {"3.4028235e38", "3.4028235e+38"},
      {"123456789.0", "123456792.0"},
      {"-0.0", "-0.0"},
      {"-inf", "-inf"},
      {"--inf", "inf"},
  };
  for (const auto& [text, canonical] : kTexts) {
    EXPECT_EQ(canonical_score("max(s, " + std::string(text) + ")"),
              "max(s, " + std::string(canonical) + ")");
    EXPECT_EQ(canonical_score("max(s, " + std::string(canonical) + ")"),
              "max(s, " + std::string(canonical) + ")");
  }
  EXPECT_EQ(evaluate(parse_score("s + 0.1"), {}), static_cast<double>(0.1F));
}

TEST(Expression, ConstantsAreFolded) {
  const std::pair<const char*, const char*> kMasks[] = {
      {"1 + 2 * 3 == q", "7 == q"},
      {"q == 2147483647 + 1", "q == -2147483648"},
      {"q == -2147483648 - 1", "q == 2147483647"},
      {"q == -(-2147483648)", "q == -2147483648"},
      {"q == abs(-2147483648)", "q == -2147483648"},
      {"q == 65536 * 65536 + 3", "q == 3"},
      {"q == -7 // 2", "q == -4"},
      {"q == 7 // -2", "q == -4"},
      {"q == -2147483648 // -1", "q == -2147483648"},
      {"q == -7 % 3", "q == 2"},
      {"q == 7 % -3", "q == -2"},
      {"q == -2147483648 % -1", "q == 0"},
      {"q // (3 - 5) == 0", "q // -2 == 0"},
      {"q == min(3, 2) + max(3, 2) + where(1 < 2, 10, 20)", "q == 15"},
      {"q > k & (1 < 2 ^ ~false)", "q > k & false"},
      {"q + 1 + 2 == k", "q + 1 + 2 == k"}, // as it is computed
      {"0 * q == 0", "0 * q == 0"},
      {"1 == 1.0 & 2 != 2.5", "true"},
  };
  for (const auto& [text, canonical] : kMasks)
    EXPECT_EQ(canonical_mask(text), canonical) << text;
  const std::pair<const char*, const char*> kScores[] = {
      {"s * (1 / 3)", "s * 0.33333334"},
      {"s * sqrt(2)", "s * 1.4142135"},
      {"s * (1.0 / 0.0)", "s * inf"},
      {"s * (3e38 * 10)", "s * inf"},
      {"s + float(16777217)", "s + 16777216.0"},
      {"s + abs(-1.5) - -(0.5)", "s + 1.5 - -0.5"},
      {"s + exp(1) * tanh(0.5)", "s + exp(1.0) * tanh(0.5)"},
      {"s + pow(2.0, 1 + 1)", "s + pow(2.0, 2.0)"},
  };
  for (const auto& [text, canonical] : kScores)
    EXPECT_EQ(canonical_score(text), canonical) << text;
}

TEST(Expression, IntsWrapAndDivideAsInPython) {
  const std::pair<const char*, double> kValues[] = {
      {"(q + k)", 10},
      {"(k - q - k * 2 + 8)", -2},
      {"((k - q) // 3)", -2},
      {"((k - q) // -3)", 1},
      {"((k - q) % 3)", 2},
      {"((q - k) % -3)", -2},
      {"((q - 7 - 2147483647 - 1) // -1)", INT32_MIN},
      {"((q - 7 - 2147483647 - 1) % -1)", 0},
      {"(2147483647 + b)", INT32_MIN},
      {"(-2147483647 - h)", INT32_MAX},
      {"(65536 * (65536 * b))", 0},
      {"(-(q - 7 - 2147483647 - 1))", INT32_MIN},
      {"abs(q - 7 - 2147483647 - 1)", INT32_MIN},
      {"abs(k - q)", 4},
      {"where(q > k, h, b)", 2},
      {"(q - k // 2 * 2 - min(k, q) * max(b, 1))", 2},
  };
  for (const auto& [text, value] : kValues)
    EXPECT_EQ(value_of_int(text), value) << text;
}

TEST(Expression, OperandsWithoutATableAreIntsOfMasksAndFloatsOfScores) {
  const Expression mask = parse_mask("last[doc[b, k]] >= q & doc[b, q] % 2 == 0");
  EXPECT_EQ(mask.operands(), (std::vector<ExpressionOperand>{{"last", {ValueType::integer, 1}},
                                                             {"doc", {ValueType::integer, 2}}}));
  const Expression score = parse_score("s * scale[h] + bias[q, k]");
  EXPECT_EQ(score.operands(), (std::vector<ExpressionOperand>{{"scale", {ValueType::real, 1}},
                                                              {"bias", {ValueType::real, 2}}}));
  // Words of other languages that are common names, too.
  EXPECT_EQ(to_string(parse_mask("head[h] == batch[b]")), "head[h] == batch[b]");
}

TEST(Expression, DependsOnWhatItReads) {
  const Expression mask = parse_mask("doc[b, q] == last[doc[b, k]] & h < 2");
  EXPECT_EQ(dependence(mask), (Dependence{true, true, true, true, false}));
  EXPECT_EQ(dependence(parse_mask("true")), Dependence());
  const Expression score = parse_score("s + slope[h] * (k - q)");
  EXPECT_EQ(dependence(score), (Dependence{false, true, true, true, true}));
  EXPECT_EQ(dependence(parse_score("30.0 * tanh(s / 30.0)")), Dependence{.s = true});
}

TEST(Expression, NodesAreEachOnceAndComeAfterTheirInputs) {
  const Expression e = parse_mask("(q - k) * (q - k) < 9 & q - k > 0");
  EXPECT_EQ(e.nodes().size(), 9U); // q, k, q - k, its square, 9, <, 0, >, &
  for (size_t i = 0; i < e.nodes().size(); ++i)
    for (int input : e.nodes()[i].inputs)
      EXPECT_LT(input, static_cast<int>(i));
}

/// Draws expressions and compares their values with their own, before and after they are printed.
template <typename Draw> void expect_own_values(bool score, const Draw& draw) {
  test::Drawer drawer(score ? 1 : 2, score);
  int finite = 0, compared = 0;
  for (int i = 0; i < 600; ++i) {
    const test::Drawn drawn = draw(drawer, 1 + i % 4);
    if (drawn.text.size() > kMostCharacters)
      continue;
    const Expression parsed = score ? parse_score(drawn.text, &test::kDrawnOperands)
                                    : parse_mask(drawn.text, &test::kDrawnOperands);
    const std::string text = to_string(parsed);
    const Expression again =
        score ? parse_score(text, &test::kDrawnOperands) : parse_mask(text, &test::kDrawnOperands);
    EXPECT_EQ(parsed, again) << drawn.text;
    EXPECT_EQ(text, to_string(again));
    for (int j = 0; j < 20; ++j) {
      const Point at = drawer.point();
      const double own = drawn.value(at);
      const double value = evaluate(parsed, at, test::drawn_operands(parsed));
      EXPECT_TRUE(value == own || (std::isnan(value) && std::isnan(own)))
          << drawn.text << ": " << value << " is not " << own << ", printed as " << text;
      finite += std::isfinite(own);
      ++compared;
    }
  }
  EXPECT_GT(compared, 8000);
  EXPECT_GT(finite, compared / 2);
}

TEST(Expression, IntsBeyond24BitsShareNumbersInFp32) {
  const Expression mask = parse_mask("float(q) == 16777216.0", nullptr);
  for (bool in_fp32 : {false, true}) {
    EXPECT_EQ(evaluate(mask, {.q = 16777216}, nullptr, in_fp32), 1);
    EXPECT_EQ(evaluate(mask, {.q = 16777217}, nullptr, in_fp32), in_fp32);
    EXPECT_EQ(evaluate(mask, {.q = 16777218}, nullptr, in_fp32), 0);
  }
}

TEST(Expression, DrawnMasksHaveTheirValuesAndAreReadBack) {
  expect_own_values(false, [](test::Drawer& drawer, int depth) { return drawer.boolean(depth); });
}

TEST(Expression, DrawnScoresHaveTheirValuesAndAreReadBack) {
  expect_own_values(true, [](test::Drawer& drawer, int depth) {
    test::Drawn drawn = drawer.real(depth);
    return test::Drawn{"(s+" + drawn.text + ")", false,
                       [drawn](const Point& at) { return at.s + drawn.value(at); }};
  });
}

} // namespace
