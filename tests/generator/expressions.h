//===- expressions.h - Random expressions with values of their own ----------===//
//
// A drawn expression has a text with all brackets, and a function that computes its value from the
// meaning of the language, without the parser and the evaluator.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/expression.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

namespace sagebwd::test {

/// Operands that drawn expressions read. Each has 5 elements along each index.
inline const OperandTypes kDrawnOperands = {{"doc", {ValueType::integer, 2}},
                                            {"length", {ValueType::integer, 1}},
                                            {"slope", {ValueType::real, 1}},
                                            {"bias", {ValueType::real, 2}}};
/// Elements of operands, in C++ that tests compile as well.
#define SAGEBWD_DRAWN_ELEMENTS                                                                     \
  inline int clamped(int i) { return i < 0 ? 0 : i > 4 ? 4 : i; }                                  \
  inline int read_doc(int i, int j) { return clamped(i) * 3 - clamped(j) * 2; }                    \
  inline int read_length(int i) { return 7 - clamped(i) * 5; }                                     \
  inline float read_slope(int i) { return clamped(i) * 0.375f - 1; }                               \
  inline float read_bias(int i, int j) { return clamped(i) * 0.25f - clamped(j) * 0.625f; }
SAGEBWD_DRAWN_ELEMENTS
#define SAGEBWD_QUOTED(...) #__VA_ARGS__
#define SAGEBWD_QUOTED_TEXT(...) SAGEBWD_QUOTED(__VA_ARGS__)
inline const char kDrawnElements[] = SAGEBWD_QUOTED_TEXT(SAGEBWD_DRAWN_ELEMENTS);

inline double drawn_element(const std::string& name, int i, int j) {
  if (name == "doc")
    return read_doc(i, j);
  if (name == "length")
    return read_length(i);
  return name == "slope" ? read_slope(i) : read_bias(i, j);
}
/// Reads the operands of an expression.
inline ReadOperand drawn_operands(const Expression& expression) {
  return [operands = expression.operands()](size_t operand, int32_t i, int32_t j) {
    return drawn_element(operands.at(operand).name, i, j);
  };
}

struct Drawn {
  std::string text;
  bool constant = false; ///< computed when it is parsed, and then rounded to FP32
  std::function<double(const Point&)> value;
};

/// Draws expressions of at most `depth` operations inside each other.
class Drawer {
public:
  explicit Drawer(unsigned seed, bool with_score) : random_(seed), with_score_(with_score) {}

  /// Positions, some of them extreme, and a score.
  Point point() {
    const auto position = [&]() -> int32_t {
      constexpr int32_t kExtreme[] = {INT32_MIN, INT32_MAX, -1, 0};
      return below(8) ? below(4096) : kExtreme[below(4)];
    };
    return {below(4), below(8), position(), position(), std::normal_distribution<>(0, 3)(random_)};
  }

  Drawn boolean(int depth) {
    if (depth == 0)
      return below(2) ? Drawn{"true", true, [](const Point&) { return 1; }}
                      : Drawn{"false", true, [](const Point&) { return 0; }};
    const Drawn a = boolean(depth - 1), b = boolean(depth - 1);
    switch (below(8)) {
    case 0:
      return binary(a, "&", b, [](double x, double y) { return x * y; });
    case 1:
      return binary(a, "|", b, [](double x, double y) { return x + y - x * y; });
    case 2:
      return binary(a, "^", b, [](double x, double y) { return x + y == 1; });
    case 3:
      return unary("(~", a, ")", [](double x) { return 1 - x; });
    case 4:
      return chosen(a, b, boolean(depth - 1));
    default:
      return below(2) ? compared(integer(depth - 1), integer(depth - 1))
                      : compared(real(depth - 1), rounded(number(depth - 1)));
    }
  }

  Drawn integer(int depth) {
    if (depth == 0)
      return integer_leaf();
    const Drawn a = integer(depth - 1), b = integer(depth - 1);
    switch (below(10)) {
    case 0:
      return binary(a, "+", b, [](double x, double y) { return wrapped(x + y); });
    case 1:
      return binary(a, "-", b, [](double x, double y) { return wrapped(x - y); });
    case 2:
      return binary(a, "*", b, [](double x, double y) {
        return wrapped_int(static_cast<int64_t>(x) * static_cast<int64_t>(y));
      });
    case 3:
      return divided(a, "//", [](double x, double y) { return wrapped(std::floor(x / y)); });
    case 4:
      return divided(a, "%", [](double x, double y) { return x - y * std::floor(x / y); });
    case 5:
      return unary("(-", a, ")", [](double x) { return wrapped(-x); });
    case 6:
      return unary("abs(", a, ")", [](double x) { return wrapped(std::fabs(x)); });
    case 7:
      return function("min", a, b, [](double x, double y) { return std::min(x, y); });
    case 8:
      return function("max", a, b, [](double x, double y) { return std::max(x, y); });
    default:
      return below(2) ? chosen(boolean(depth - 1), a, b) : read("doc", {a, b});
    }
  }

  /// No constant is NaN, which the parser refuses.
  Drawn real(int depth) {
    for (;;) {
      Drawn made = any_real(depth);
      if (!std::isnan(made.value({})) || !std::isnan(made.value({1, 2, 3, 4, 0.5})))
        return made;
    }
  }

private:
  Drawn any_real(int depth) {
    if (depth == 0)
      return real_leaf();
    const Drawn a = real(depth - 1);
    const bool before = below(2);
    const Drawn other = rounded(number(depth - 1)), left = before ? other : a,
                right = before ? a : other;
    switch (below(15)) {
    case 0:
      return rounded(binary(left, "+", right, [](double x, double y) { return x + y; }));
    case 1:
      return rounded(binary(left, "-", right, [](double x, double y) { return x - y; }));
    case 2:
    case 3:
      return rounded(binary(left, "*", right, [](double x, double y) { return x * y; }));
    case 4:
      return rounded(binary(left, "/", right, [](double x, double y) { return x / y; }));
    case 5:
      return unary("(-", a, ")", [](double x) { return -x; });
    case 6:
      return unary("abs(", a, ")", [](double x) { return std::fabs(x); });
    case 7:
      return function("min", left, right, [](double x, double y) { return y < x ? y : x; });
    case 8:
      return function("max", left, right, [](double x, double y) { return x < y ? y : x; });
    case 9:
      return chosen(boolean(depth - 1), left, right);
    case 10:
      return below(2) ? exact(unary("tanh(", other, ")", [](double x) { return std::tanh(x); }))
                      : exact(unary("exp(", other, ")", [](double x) { return std::exp(x); }));
    case 11:
      return below(2) ? exact(unary("log(", other, ")", [](double x) { return std::log(x); }))
                      : rounded(unary("sqrt(", other, ")", [](double x) { return std::sqrt(x); }));
    case 12:
      return exact(unary("sigmoid(", other, ")", [](double x) { return 1 / (1 + std::exp(-x)); }));
    case 13: {
      const double exponent = below(9) * 0.5 - 1.5;
      return exact(unary("pow(", a, ", " + decimal(exponent) + ")",
                         [=](double x) { return std::pow(x, exponent); }));
    }
    default:
      return below(2)
                 ? rounded(unary("float(", integer(depth - 1), ")", [](double x) { return x; }))
                 : read("bias", {integer(depth - 1), integer(depth - 1)});
    }
  }

  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }

  using One = std::function<double(double)>;
  using Two = std::function<double(double, double)>;

  static int32_t wrapped_int(int64_t x) { return static_cast<int32_t>(static_cast<uint64_t>(x)); }
  static double wrapped(double x) { return wrapped_int(static_cast<int64_t>(x)); }
  /// A multiple of 1/8, of which six digits are exact.
  static std::string decimal(double x) { return std::to_string(x); }

  Drawn integer_leaf() {
    switch (below(8)) {
    case 0:
      return {"b", false, [](const Point& at) { return at.b; }};
    case 1:
      return {"h", false, [](const Point& at) { return at.h; }};
    case 2:
    case 3:
      return {"q", false, [](const Point& at) { return at.q; }};
    case 4:
    case 5:
      return {"k", false, [](const Point& at) { return at.k; }};
    case 6:
      return read("length", {{"b", false, [](const Point& at) { return at.b; }}});
    default:
      constexpr int32_t kValues[] = {0, 1, -1, 7, 1000, INT32_MAX, INT32_MIN};
      const int32_t value = kValues[below(7)];
      return {std::to_string(value), true, [=](const Point&) { return value; }};
    }
  }
  Drawn real_leaf() {
    if (with_score_ && below(2))
      return {"s", false, [](const Point& at) { return at.s; }};
    if (below(3) == 0)
      return read("slope", {{"h", false, [](const Point& at) { return at.h; }}});
    const double value = below(33) * 0.25 - 4;
    return {decimal(value), true, [=](const Point&) { return value; }};
  }
  /// An int or a float.
  Drawn number(int depth) { return below(4) ? real(depth) : integer(depth); }

  Drawn compared(const Drawn& a, const Drawn& b) {
    switch (below(6)) {
    case 0:
      return binary(a, "==", b, [](double x, double y) { return x == y; });
    case 1:
      return binary(a, "!=", b, [](double x, double y) { return x != y; });
    case 2:
      return binary(a, "<", b, [](double x, double y) { return x < y; });
    case 3:
      return binary(a, "<=", b, [](double x, double y) { return x <= y; });
    case 4:
      return binary(a, ">", b, [](double x, double y) { return x > y; });
    default:
      return binary(a, ">=", b, [](double x, double y) { return x >= y; });
    }
  }
  Drawn divided(const Drawn& a, const std::string& sign, const Two& value) {
    constexpr int kDivisors[] = {1, -1, 2, -2, 3, -7, 128};
    const int divisor = kDivisors[below(7)];
    return binary(a, sign, {std::to_string(divisor), true, [=](const Point&) { return divisor; }},
                  value);
  }
  static Drawn unary(const std::string& before, const Drawn& a, const std::string& after,
                     const One& value) {
    return {before + a.text + after, a.constant,
            [=](const Point& at) { return value(a.value(at)); }};
  }
  static Drawn binary(const Drawn& a, const std::string& sign, const Drawn& b, const Two& value) {
    return {"(" + a.text + sign + b.text + ")", a.constant && b.constant,
            [=](const Point& at) { return value(a.value(at), b.value(at)); }};
  }
  static Drawn function(const std::string& name, const Drawn& a, const Drawn& b, const Two& value) {
    Drawn drawn = binary(a, ",", b, value);
    drawn.text = name + drawn.text;
    return drawn;
  }
  static Drawn chosen(const Drawn& c, const Drawn& a, const Drawn& b) {
    return {"where(" + c.text + "," + a.text + "," + b.text + ")",
            c.constant && a.constant && b.constant,
            [=](const Point& at) { return c.value(at) != 0 ? a.value(at) : b.value(at); }};
  }
  static Drawn read(const std::string& name, const std::vector<Drawn>& indices) {
    return {name + "[" + indices[0].text + (indices.size() > 1 ? "," + indices[1].text : "") + "]",
            false, [=](const Point& at) {
              const auto index = [&](size_t i) {
                return i < indices.size() ? static_cast<int>(indices[i].value(at)) : 0;
              };
              return drawn_element(name, index(0), index(1));
            }};
  }
  /// A float that is rounded where it is a constant. NaN is none.
  static Drawn rounded(Drawn drawn) {
    if (!drawn.constant)
      return drawn;
    const double value = static_cast<float>(drawn.value({}));
    return {drawn.text, !std::isnan(value), [=](const Point&) { return value; }};
  }
  /// A value that the parser never computes.
  static Drawn exact(Drawn drawn) { return drawn.constant = false, drawn; }

  std::mt19937 random_;
  bool with_score_;
};

} // namespace sagebwd::test
