//===- expression_derivative_test.cpp - Derivatives of score functions ------===//

#include "generator/expression.h"
#include "tests/generator/expressions.h"

#include <gtest/gtest.h>

#include <optional>

using namespace sagebwd;

namespace {

std::string derived(const std::string& text) { return to_string(derivative(parse_score(text))); }

TEST(ExpressionDerivative, IsSimplified) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"s", "1.0"},
      {"-s", "-1.0"},
      {"--s", "1.0"},
      {"s + slope[h] * (k - q)", "1.0"},
      {"bias[q, k] - s", "-1.0"},
      {"s * scale[h]", "scale[h]"},
      {"scale[h] * s * 2", "2.0 * scale[h]"},
      {"s * (k - q)", "float(k - q)"},
      {"s / 4", "0.25"},
      {"s / scale[h]", "1.0 / scale[h]"},
      {"1 / s", "-(1.0 / s) / s"},
      {"s * s", "s + s"},
      {"30.0 * tanh(s / 30.0)", "1.0 - tanh(s / 30.0) * tanh(s / 30.0)"},
      {"exp(2 * s)", "2.0 * exp(2.0 * s)"},
      {"log(s)", "1.0 / s"},
      {"log(s * 2)", "2.0 / (s * 2.0)"},
      {"sqrt(s)", "1.0 / (2.0 * sqrt(s))"},
      {"sigmoid(s)", "sigmoid(s) * (1.0 - sigmoid(s))"},
      {"sigmoid(-s)", "-(sigmoid(-s) * (1.0 - sigmoid(-s)))"},
      {"pow(s, 0) + s", "1.0"},
      {"pow(s, 1)", "1.0"},
      {"pow(s, 2)", "2.0 * s"},
      {"pow(s, -0.5)", "-0.5 * pow(s, -1.5)"},
      {"min(s, 8)", "where(8.0 < s, 0.0, 1.0)"},
      {"max(s, bias[q, k])", "where(s < bias[q, k], 0.0, 1.0)"},
      {"min(s, s + bias[h])", "1.0"},
      {"abs(s)", "where(s < 0.0, -1.0, 1.0)"},
      {"where(q >= k, s, -inf)", "where(q >= k, 1.0, 0.0)"},
      {"where(s > 0.0, 2 * s, s)", "where(s > 0.0, 2.0, 1.0)"},
      {"where(q >= k, s, s - 1)", "1.0"},
      {"where(s > 0.0, 1.0, 2.0)", "0.0"},
      {"float(where(s > 0.0, q, k)) + s", "1.0"},
      {"4 * (tanh(s) * 0.5)", "2.0 * (1.0 - tanh(s) * tanh(s))"},
      {"1e30 * (1e30 * exp(s))", "1e+30 * (1e+30 * exp(s))"}, // their product is inf in FP32
  };
  for (const auto& [text, expected] : kTexts)
    EXPECT_EQ(derived(text), expected) << text;
}

TEST(ExpressionDerivative, ShiftsAreRecognisedAndScalesHaveOneSlope) {
  struct Case {
    const char* text;
    bool shift, scale;
  };
  const Case kCases[] = {
      {"s", true, true},
      {"s + slope[h] * (k - q)", true, false},
      {"bias[h, q - k] + s", true, false},
      {"(s - 1) + (q - 2.0)", true, false},
      {"bias[q, k] - s", false, false},
      {"where(q > k, s, s + bias[h])", true, false},
      {"where(s > 0.0, s, s + bias[h])", false, false},
      {"where(q >= k, s, -inf)", false, false},
      {"min(s + bias[h], s - 1)", true, false},
      {"min(s, 1)", false, false},
      {"s + s", false, false},
      {"s + where(s > 0.0, 1.0, 2.0)", false, false},
      {"s * scale[h]", false, true},
      {"-(scale[h] * (2 * s / 3))", false, true},
      {"where(b == 0, s, 2 * s)", false, true},
      {"where(s > 0.0, s, 2 * s)", false, false},
      {"s * s", false, false},
      {"2 / s", false, false},
      {"max(s, 2 * s)", false, false},
      {"abs(s)", false, false},
      {"30.0 * tanh(s / 30.0)", false, false},
  };
  for (const auto& [text, shift, scale] : kCases) {
    EXPECT_EQ(is_shift(parse_score(text)), shift) << text;
    const Expression d = derivative(parse_score(text));
    EXPECT_TRUE(!shift || to_string(d) == "1.0") << text;
    EXPECT_TRUE(!scale || !dependence(d).s) << text;
  }
}

TEST(ExpressionDerivative, IsReadBack) {
  for (const char* text : {"30.0 * tanh(s / 30.0)", "sigmoid(s) * log(s) / sqrt(s)",
                           "min(s * s, max(exp(s), pow(s, 3))) * bias[q, k]"}) {
    const Expression d = derivative(parse_score(text));
    EXPECT_EQ(parse_score(to_string(d)), d);
  }
}

/// Factors have moved to constants, and nothing else has changed.
TEST(ExpressionRescaled, PutsFactorsWhereTheyMeetConstants) {
  const auto text = [](const char* score) {
    return to_string(rescaled(parse_score(score), 0.5, 2));
  };
  EXPECT_EQ(text("s"), "s");
  EXPECT_EQ(text("s + bias[h]"), "s + 2.0 * bias[h]");
  EXPECT_EQ(text("30.0 * tanh(s / 30.0)"), "60.0 * tanh(0.016666668 * s)");
  EXPECT_EQ(text("where(s > 1.0, s, 4.0 * s)"), "where(0.5 * s > 1.0, s, 4.0 * s)");
  EXPECT_EQ(text("s / bias[h]"), "s / bias[h]");
  EXPECT_EQ(text("max(s, 1.0) - min(2.0, -s)"), "max(s, 2.0) - min(4.0, -1.0 * s)");
}

TEST(ExpressionRescaled, ConvertsPositionsAndNotTheirSums) {
  const auto text = [](const char* score) { return to_string(rescaled(parse_score(score), 1, 1)); };
  EXPECT_EQ(text("s + abs(q - k)"), "s + abs(float(q) - k)");
  EXPECT_EQ(text("s + float(3 - (k + 5))"), "s + (3.0 - (k + 5.0))");
  EXPECT_EQ(text("s + q * k"), "s + q * k");
  EXPECT_EQ(text("s + (q - 16777217)"), "s + (q - 16777217)");
}

TEST(ExpressionRescaled, TakesSTimesTheOneFactorOfItsUses) {
  const auto text = [](const char* score) {
    const Expression parsed = parse_score(score);
    const std::set<double> factors = factors_of_s(parsed, 0.5, 2);
    const double given = factors.size() == 1 ? *factors.begin() : 1;
    return to_string(rescaled(parsed, 0.5, 2, given));
  };
  EXPECT_EQ(text("30.0 * tanh(s / 30.0)"), "60.0 * tanh(s)");
  EXPECT_EQ(text("0.125 * s + bias[h]"), "s + 2.0 * bias[h]");
  EXPECT_EQ(text("tanh(s / 4.0) + s"), "2.0 * tanh(0.125 * s) + s"); // two factors
}

TEST(ExpressionRescaled, OfDrawnFunctionsIsTheFunctionInOtherUnits) {
  test::Drawer drawer(7, true);
  int judged = 0;
  for (int i = 0; i < 600; ++i) {
    const std::string text = "s + (" + drawer.real(1 + i % 4).text + ")";
    if (text.size() > kMostCharacters)
      continue;
    const Expression score = parse_score(text, &test::kDrawnOperands);
    const Expression scaled = rescaled(score, 0.25, -3);
    for (int j = 0; j < 5; ++j) {
      Point at = drawer.point();
      for (int32_t* position : {&at.b, &at.h, &at.q, &at.k})
        *position %= 1 << 20; // sums of them become floats part by part
      const double s = at.s;
      const auto wanted_at = [&](double x) {
        at.s = x;
        return -3 * evaluate(score, at, test::drawn_operands(score));
      };
      const double wanted = wanted_at(s);
      // Literals are rounded to FP32, and what is steep or close to a jump enlarges that.
      const double change = std::max(std::fabs(wanted_at(s * (1 + 1e-5)) - wanted),
                                     std::fabs(wanted_at(s * (1 - 1e-5)) - wanted));
      if (!std::isfinite(wanted) || std::fabs(wanted) > 1e6 || !(change <= 1e-2))
        continue;
      at.s = 4 * s;
      EXPECT_NEAR(evaluate(scaled, at, test::drawn_operands(scaled)), wanted,
                  change + 1e-4 * std::max(1.0, std::fabs(wanted)))
          << text << " at s = " << s;
      ++judged;
    }
  }
  EXPECT_GE(judged, 1000);
}

/// A limit of difference quotients of a function, if they agree.
std::optional<double> slope_of(const std::function<double(double)>& f, double at) {
  const auto quotient = [&](double from, double to) {
    return (f(at + to) - f(at + from)) / (to - from);
  };
  constexpr double kStep = 1e-5;
  const double central = quotient(-kStep, kStep);
  for (double other : {quotient(-kStep / 2, kStep / 2), quotient(0, kStep), quotient(-kStep, 0)})
    if (!(std::fabs(other - central) <= 1e-3 * std::fabs(central) + 1e-5)) // a kink, a jump, NaN
      return std::nullopt;
  return central;
}

TEST(ExpressionDerivative, OfDrawnFunctionsIsTheLimitOfDifferences) {
  test::Drawer drawer(3, true);
  int points = 0, judged = 0, undefined = 0, not_constant = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::string text = drawer.real(1 + i % 4).text;
    if (text.size() > kMostCharacters || text.find('s') == std::string::npos)
      continue;
    std::optional<Expression> f;
    try {
      f = parse_score(text, &test::kDrawnOperands);
    } catch (const SpecError&) { // without s, or that alone is folded
      continue;
    }
    const Expression d = derivative(*f);
    not_constant += dependence(d).s;
    for (int j = 0; j < 10; ++j) {
      Point at = drawer.point();
      at.q = std::abs(at.q % 16), at.k = std::abs(at.k % 16);
      const auto value = [&](double s) {
        Point moved = at;
        moved.s = s;
        return evaluate(*f, moved, test::drawn_operands(*f));
      };
      if (std::fabs(value(at.s)) > 1e6) // what rounding leaves of a difference
        continue;
      ++points;
      const std::optional<double> expected = slope_of(value, at.s);
      if (!expected)
        continue;
      ++judged;
      const double slope = evaluate(d, at, test::drawn_operands(d));
      if (std::isnan(slope)) { // 0 times the infinite derivative of a part, as of sqrt at 0
        ++undefined;
        continue;
      }
      EXPECT_NEAR(slope, *expected, 1e-3 * std::fabs(*expected) + 1e-4)
          << "of " << text << " at s = " << at.s << ": " << to_string(d);
    }
  }
  EXPECT_GT(points, 3000);
  EXPECT_GT(judged, points * 8 / 10);
  EXPECT_LT(undefined, judged / 50);
  EXPECT_GT(not_constant, 200);
}

} // namespace
