//===- pointwise.cpp - The expressions of a spec: mask and score function ---===//

#include "generator/pointwise.h"

#include "generator/operands.h"

#include <mutex>

namespace sagebwd {
namespace {

static_assert(kMostOperands == kMostTables);

/// Expressions by their texts, of which there are as many as a process has masks and scores.
class Parsed {
public:
  const Expression& of(const std::string& text, Expression (*parse)(std::string_view)) {
    const std::lock_guard lock(mutex_);
    auto found = parsed_.find(text);
    if (found == parsed_.end())
      found = parsed_.emplace(text, parse(text)).first;
    return found->second;
  }

private:
  std::mutex mutex_;
  std::map<std::string, Expression> parsed_;
};

/// Each line of a text, indented.
std::string indented(const std::string& text) {
  std::string lines;
  for (size_t from = 0, to; from < text.size(); from = to + 1) {
    to = text.find('\n', from);
    lines += "    " + text.substr(from, to - from) + "\n";
  }
  return lines;
}

std::string title(const std::string& file, const char* what) {
  std::string line = "//===- " + file + " - " + what + " ";
  line.resize(std::max<size_t>(line.size(), 74), '-');
  return line + "===//\n";
}

/// A method that computes an expression of the tables of a spec from `first` on, and what is before
/// its statements and its result.
std::string method(const char* type, const char* name, const char* arguments,
                   const Expression& expression, size_t first, bool floats,
                   const std::string& statements = "", const std::string& factor = "") {
  std::string text = "  __device__ __forceinline__ " + std::string(type) + " " + name + "(" +
                     arguments + ") const {\n";
  for (size_t i = 0; i < expression.operands().size(); ++i) {
    const ExpressionOperand& operand = expression.operands()[i];
    const std::string table = "p.table_" + std::to_string(first + i);
    const bool two = operand.type.indices == 2;
    const std::string read = "read_table(" + table + ", " + table + "_rows, " + table +
                             "_columns, " + (two ? "i" : "0") + ", j)";
    text += "    const auto read_" + operand.name + " = [&](" + (two ? "int i, int j" : "int j") +
            ") { return " + (floats ? "__int_as_float(" + read + ")" : read) + "; };\n";
  }
  const CudaText cuda = to_cuda(expression);
  const std::string result = factor.empty() ? cuda.result : factor + "(" + cuda.result + ")";
  return text + indented(statements + cuda.statements) + "    return " + result + ";\n  }\n";
}

/// One of a score in units of log2.
std::string scaled_method(const char* name, const char* factor, const Expression& expression,
                          size_t first) {
  return method("float", name, "int q, int k, float log2_s", expression, first, true,
                "const float s = LN_2 * log2_s;\n", factor);
}

/// The slope's tables are the score's, in the order in which it reads them.
std::string slope_method(const AttentionSpec& spec, size_t first) {
  const Expression slope = derivative(score_of(spec));
  const std::vector<ExpressionOperand>& of_score = score_of(spec).operands();
  std::string text = scaled_method("slope", "", slope, 0);
  for (size_t i = 0; i < slope.operands().size(); ++i) {
    const auto at = std::find(of_score.begin(), of_score.end(), slope.operands()[i]);
    const std::string from = "p.table_" + std::to_string(i),
                      to = "p.table@" + std::to_string(first + (at - of_score.begin()));
    for (size_t place; (place = text.find(from)) != std::string::npos;)
      text.replace(place, from.size(), to);
  }
  std::replace(text.begin(), text.end(), '@', '_');
  return text;
}

} // namespace

const Expression& mask_of(const AttentionSpec& spec) {
  static Parsed parsed;
  return parsed.of(spec.mask, [](std::string_view text) { return parse_mask(text); });
}
const Expression& score_of(const AttentionSpec& spec) {
  static Parsed parsed;
  return parsed.of(spec.score, [](std::string_view text) { return parse_score(text); });
}

std::vector<TableOfSpec> tables_of(const AttentionSpec& spec) {
  std::vector<TableOfSpec> tables;
  if (!spec.mask.empty())
    for (const ExpressionOperand& operand : mask_of(spec).operands())
      tables.push_back({operand.name, operand.type.indices, false});
  if (!spec.score.empty())
    for (const ExpressionOperand& operand : score_of(spec).operands())
      tables.push_back({operand.name, operand.type.indices, true});
  return tables;
}

bool mask_depends_on_batch(const AttentionSpec& spec) {
  return !spec.mask.empty() && dependence(mask_of(spec)).b;
}
bool mask_depends_on_head(const AttentionSpec& spec) {
  return !spec.mask.empty() && dependence(mask_of(spec)).h;
}
bool bends_scores(const AttentionSpec& spec) {
  return !spec.score.empty() && !is_shift(score_of(spec));
}

bool score_reads(const AttentionSpec& spec) {
  return has_score(spec) && !score_of(spec).operands().empty();
}

std::string mask_source(const AttentionSpec& spec) {
  return title("mask_expression.cuh", "What a query sees") +
         "#include \"tile/math/expressions.cuh\"\n\n/// " + to_string(mask_of(spec)) +
         "\nstruct Sight {\n  const Params& p;\n  int b, h;\n\n" +
         method("bool", "sees", "int q, int k", mask_of(spec), 0, false) + "};\n";
}

std::string score_source(const AttentionSpec& spec) {
  const size_t first = spec.mask.empty() ? 0 : mask_of(spec).operands().size();
  return title("score_expression.cuh", "What becomes of a score") +
         "#include \"tile/math/expressions.cuh\"\n\n/// " + to_string(score_of(spec)) +
         "\nstruct Score {\n  const Params& p;\n  int b, h;\n\n" +
         scaled_method("exponent", "LOG2_E * ", score_of(spec), first) + slope_method(spec, first) +
         "};\n";
}

} // namespace sagebwd
