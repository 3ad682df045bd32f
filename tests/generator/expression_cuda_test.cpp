//===- expression_cuda_test.cpp - Expressions in generated source -----------===//

#include "generator/expression.h"
#include "tests/cache/temp_directory.h"
#include "tests/generator/expressions.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <sstream>

using namespace sagebwd;

namespace {

std::string cuda_of(const Expression& expression) {
  const CudaText cuda = to_cuda(expression, {"batch", "head", "query", "key", "score"});
  return cuda.statements + cuda.result;
}

TEST(ExpressionCuda, HasHelpersAndExactLiterals) {
  const std::pair<const char*, const char*> kMasks[] = {
      {"q >= k | doc[b, q] == doc[b, k]",
       "(query >= key) | (read_doc(batch, query) == read_doc(batch, key))"},
      {"~(q - k < -2147483648) & true", "(!(wrap_sub(query, key) < (-2147483647 - 1))) & true"},
      {"q // 3 % -5 * h + b == -abs(k)",
       "const int t0 = wrap_add(wrap_mul(floor_mod(floor_div(query, 3), -5), head), batch);\n"
       "t0 == wrap_neg(wrap_abs(key))"},
      {"where(b == 0, min(q, 1), max(k, 2)) > 0",
       "((batch == 0) ? min_of(query, 1) : max_of(key, 2)) > 0"},
      {"(q - k) * (q - k) < 9", "const int t0 = wrap_sub(query, key);\nwrap_mul(t0, t0) < 9"},
  };
  for (const auto& [text, cuda] : kMasks)
    EXPECT_EQ(cuda_of(parse_mask(text)), cuda);
  const std::pair<const char*, const char*> kScores[] = {
      {"30.0 * tanh(s / 30.0)", "0x1.ep+4f * tanh_of(quotient(score, 0x1.ep+4f))"},
      {"s + slope[h] * (k - q)", "score + (read_slope(head) * to_float(wrap_sub(key, query)))"},
      {"where(q >= k, -s, -inf)", "(query >= key) ? (-score) : -infinity()"},
      {"s - 0.1 + -0.0", "(score - 0x1.99999ap-4f) + -0x0p+0f"},
      {"abs(exp(s)) + log(sqrt(s)) * sigmoid(pow(s, 2))",
       "abs_of(exp_of(score)) + (log_of(sqrt_of(score)) * sigmoid_of(pow_of(score, 0x1p+1f)))"},
  };
  for (const auto& [text, cuda] : kScores)
    EXPECT_EQ(cuda_of(parse_score(text)), cuda);
}

TEST(ExpressionCuda, LongExpressionsAreSplit) {
  std::string text = "s";
  for (int i = 0; i < 120; ++i)
    text += " + tanh(s)"; // a chain, which would nest as deeply
  std::istringstream lines(cuda_of(parse_score(text)));
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count)
    EXPECT_LT(line.size(), 100U) << line;
  EXPECT_GT(count, 5);
}

/// The helpers that the header of expressions asks for.
const char kHelpers[] = R"(
inline int wrapped(unsigned x) { return static_cast<int>(x); }
inline int wrap_add(int a, int b) { return wrapped(unsigned(a) + unsigned(b)); }
inline int wrap_sub(int a, int b) { return wrapped(unsigned(a) - unsigned(b)); }
inline int wrap_mul(int a, int b) { return wrapped(unsigned(a) * unsigned(b)); }
inline int wrap_neg(int a) { return wrapped(-unsigned(a)); }
inline int wrap_abs(int a) { return a < 0 ? wrap_neg(a) : a; }
inline int floor_mod(int a, int c) {
  if (c == -1)
    return 0;
  const int rest = a % c;
  return rest != 0 && (rest < 0) != (c < 0) ? rest + c : rest;
}
inline int floor_div(int a, int c) {
  if (c == -1)
    return wrap_neg(a);
  return a / c - (a % c != 0 && (a < 0) != (c < 0));
}
inline int min_of(int a, int b) { return b < a ? b : a; }
inline int max_of(int a, int b) { return a < b ? b : a; }
inline float min_of(float a, float b) { return b < a ? b : a; }
inline float max_of(float a, float b) { return a < b ? b : a; }
inline float abs_of(float a) { return std::abs(a); }
inline float tanh_of(float a) { return std::tanh(a); }
inline float exp_of(float a) { return std::exp(a); }
inline float log_of(float a) { return std::log(a); }
inline float sqrt_of(float a) { return std::sqrt(a); }
inline float sigmoid_of(float a) { return 1 / (1 + std::exp(-a)); }
inline float pow_of(float a, float c) { return std::pow(a, c); }
inline float quotient(float a, float b) { return a / b; }
inline float infinity() { return HUGE_VALF; }
inline float to_float(int a) { return static_cast<float>(a); }
)";

std::string function_of(const Expression& expression, size_t number) {
  const CudaText cuda = to_cuda(expression);
  return "inline " + value_text(expression.type()) + " f" + std::to_string(number) +
         "(int b, int h, int q, int k, float s) {\n" + cuda.statements + "return " + cuda.result +
         ";\n}\n";
}

/// Compiles what is printed twice: as it is, which must not use FP64, and with FP64 in the place of
/// FP32, whose values must be those of evaluate() to the last bit. Undefined behaviour ends it.
TEST(ExpressionCuda, CompiledForTheHostHasTheValuesOfTheEvaluator) {
  std::vector<Expression> expressions;
  for (const bool score : {false, true}) {
    test::Drawer drawer(score ? 5 : 4, score);
    for (int i = 0; i < 120; ++i) {
      const std::string text =
          score ? "s + " + drawer.real(1 + i % 4).text : drawer.boolean(1 + i % 4).text;
      if (text.size() > kMostCharacters)
        continue;
      expressions.push_back(score ? parse_score(text, &test::kDrawnOperands)
                                  : parse_mask(text, &test::kDrawnOperands));
      if (score)
        expressions.push_back(derivative(expressions.back()));
    }
  }
  std::vector<Point> points;
  test::Drawer drawer(6, true);
  for (int i = 0; i < 16; ++i)
    points.push_back(drawer.point());

  std::ostringstream source;
  std::string functions, calls;
  for (size_t i = 0; i < expressions.size(); ++i) {
    functions += function_of(expressions[i], i);
    calls += "print(fp64::f" + std::to_string(i) + "(p.b, p.h, p.q, p.k, p.s));\n";
  }
  source << "#include <cmath>\n#include <cstdio>\n"
            "struct Point { int b, h, q, k; double s; };\n"
            "void print(double x) { std::printf(\"%a\\n\", x); }\n"
         << "namespace fp32 {\n"
         << kHelpers << test::kDrawnElements << functions
         << "}\n#define float double\n#pragma GCC diagnostic ignored \"-Wdouble-promotion\"\n"
         << "namespace fp64 {\n"
         << kHelpers << test::kDrawnElements << functions
         << "}\nint main() {\nconst Point points[] = {\n";
  source << std::hexfloat;
  for (const Point& p : points) // INT_MIN is no literal
    source << "{" << p.b << ", " << p.h << ", int(" << p.q << "LL), int(" << p.k << "LL), " << p.s
           << "},\n";
  source << "};\nfor (const Point& p : points) {\n" << calls << "}\n}\n";

  test::TempDirectory folder;
  const std::string program = folder.path() + "/program";
  std::ofstream(program + ".cpp") << source.str();
  ASSERT_EQ(std::system(("c++ -std=c++17 -O0 -ffp-contract=off -fsanitize=undefined "
                         "-fsanitize-undefined-trap-on-error -Werror=double-promotion "
                         "-Werror=unused-variable -o '" +
                         program + "' '" + program + ".cpp'")
                            .c_str()),
            0)
      << source.str();
  std::FILE* values = ::popen(("'" + program + "'").c_str(), "r");
  for (const Point& at : points)
    for (const Expression& expression : expressions) {
      double value = 0;
      ASSERT_EQ(std::fscanf(values, "%la", &value), 1) << to_string(expression);
      const double expected = evaluate(expression, at, test::drawn_operands(expression));
      EXPECT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected)))
          << to_string(expression) << ": " << value << " is not " << expected;
    }
  EXPECT_EQ(::pclose(values), 0);
}

} // namespace
