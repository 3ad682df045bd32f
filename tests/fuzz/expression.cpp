//===- expression.cpp - Fuzzes the parser of masks and score functions ------===//

#include "generator/expression.h"
#include "tests/fuzz/target.h"

#include <cmath>

using namespace sagebwd;

std::vector<std::string> seeds() {
  return {"q >= k | doc[b,q] == doc[b,k]",
          "~(q - k < 512) ^ true & 1.5e3 != -(h // 7 % -3)",
          "where(rank[doc[b, k]] <= 2147483647, q > k, false) & min(abs(q), max(k, 1)) >= 2",
          "30.0 * tanh(s / 30.0)",
          "s + slope[h] * (k - q) - bias[h, min(max(q - k, -128), 127)]",
          "pow(sqrt(abs(s)), 3) / exp(s) + log(sigmoid(s)) * float(q) - inf",
          "where(s > -0.5, s * 1e-5, (-2147483648 + q) / 2)",
          "((((q)))) and k"};
}

unsigned first_random() { return 9; }
std::string resealed(std::string input) { return input; }

namespace {

double element(size_t operand, int32_t i, int32_t j) {
  return static_cast<double>((static_cast<uint32_t>(i) + 3 * static_cast<uint32_t>(j) + operand) %
                             9);
}

/// An accepted text is read back from its canonical form; other text raises SpecError and nothing
/// else. Extreme positions have values.
template <typename Parse> void check(Parse parse, const std::string& text) {
  try {
    const Expression expression = parse(text, nullptr);
    const std::string canonical = to_string(expression);
    const Expression again = parse(canonical, nullptr);
    require(again == expression && to_string(again) == canonical);
    for (const Point& at :
         {Point(), Point{1, 2, INT32_MIN, INT32_MAX, -1e30}, Point{0, 0, 7, 3, 2}}) {
      const double value = evaluate(expression, at, element), same = evaluate(again, at, element);
      require(value == same || (std::isnan(value) && std::isnan(same)));
      require(expression.type() != ValueType::boolean || value == 0 || value == 1);
    }
    require(!to_cuda(expression).result.empty());
    const Expression slope = derivative(expression);
    require(slope.type() == ValueType::real && !to_string(slope).empty());
    if (is_shift(expression))
      require(to_string(slope) == "1.0");
    evaluate(slope, {}, element);
  } catch (const SpecError& error) {
    require(*error.what() != 0);
  }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  check(parse_mask, text);
  check(parse_score, text);
  return 0;
}
