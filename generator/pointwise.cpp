//===- pointwise.cpp - The expressions of a spec: mask and score function ---===//

#include "generator/pointwise.h"

#include "generator/expression_build.h"
#include "generator/operands.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace sagebwd {

static_assert(kMostOperands == kMostTables);

namespace {

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

/// What an expression's values are, and what it reads: ints; floats, which tables hold as ints; or
/// ranges of ints.
enum class Values { ints, floats, ranges };

/// The head of a method, and functions that read the tables of an expression, of a spec's from
/// `first` on.
std::string begin_method(const std::string& declaration, const Expression& expression, size_t first,
                         Values values) {
  const bool of_ranges = values == Values::ranges;
  const std::string index = of_ranges ? "Ints" : "int";
  std::string text = "  __device__ __forceinline__ " + declaration + " const {\n";
  for (size_t i = 0; i < expression.operands().size(); ++i) {
    const ExpressionOperand& operand = expression.operands()[i];
    const std::string table = "p.table_" + std::to_string(first + i);
    const bool two = operand.type.indices == 2;
    const std::string read = (of_ranges ? "range_of_table(" : "read_table(") + table + ", " +
                             table + "_rows, " + table + "_columns, " + (two ? "i" : "0") + ", j)";
    text += "    const auto read_" + operand.name + " = [&](" + (two ? index + " i, " : "") +
            index + " j) { return " +
            (values == Values::floats ? "__int_as_float(" + read + ")" : read) + "; };\n";
  }
  return text;
}
std::string statement(const CudaText& cuda, const std::string& result) {
  return indented(cuda.statements) + "    " + result + cuda.result + ";\n";
}

/// A method that computes an expression.
std::string method(const std::string& declaration, const Expression& expression, size_t first,
                   Values values) {
  const CudaText cuda =
      values == Values::ranges ? to_cuda_of_ranges(expression) : to_cuda(expression);
  return begin_method(declaration, expression, first, values) + statement(cuda, "return ") +
         "  }\n";
}

/// What a kernel reads once for all keys of a query, and the mask beside it. Registers are short.
std::string query_methods(const Expression& mask) {
  constexpr size_t kMostReads = 4;
  std::vector<size_t> reads = reads_of_query(mask);
  reads.resize(std::min(reads.size(), kMostReads));
  std::string found =
      begin_method("void read_query(int (&of)[READS], int q)", mask, 0, Values::ints);
  std::map<size_t, std::string> given;
  for (size_t i = 0; i < reads.size(); ++i) {
    given[reads[i]] = "of[" + std::to_string(i) + "]";
    // Each has its own scope, as all have constants of the same names.
    found +=
        "    {\n" + statement(to_cuda_of_node(mask, reads[i]), given[reads[i]] + " = ") + "    }\n";
  }
  return "  static constexpr int QUERY_READS = " + std::to_string(reads.size()) +
         ", READS = QUERY_READS ? QUERY_READS : 1;\n" + found + "  }\n" +
         begin_method("bool sees(const int (&of)[READS], int q, int k)", mask, 0, Values::ints) +
         statement(to_cuda_beside(mask, given), "return ") + "  }\n";
}

/// One of the score function's, or of its slope, of a score in units of log2. Its tables are the
/// score's, in the order in which it reads them.
std::string score_method(const AttentionSpec& spec, const char* name, const Expression& expression,
                         size_t first) {
  const std::vector<ExpressionOperand>& of_score = score_of(spec).operands();
  std::string text = method("float " + std::string(name) + "(int q, int k, float s)", expression, 0,
                            Values::floats);
  for (size_t i = 0; i < expression.operands().size(); ++i) {
    const auto at = std::find(of_score.begin(), of_score.end(), expression.operands()[i]);
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
bool score_depends_on_batch(const AttentionSpec& spec) {
  return has_score(spec) && dependence(score_of(spec)).b;
}
bool score_depends_on_head(const AttentionSpec& spec) {
  return has_score(spec) && dependence(score_of(spec)).h;
}
bool bends_scores(const AttentionSpec& spec) {
  return !spec.score.empty() && !is_shift(score_of(spec));
}

bool score_reads(const AttentionSpec& spec) {
  return has_score(spec) && !score_of(spec).operands().empty();
}
bool score_reads_positions(const AttentionSpec& spec) {
  if (!has_score(spec))
    return false;
  const Expression& score = score_of(spec);
  const std::vector<Dependence> depend = dependences(score);
  for (size_t i = 0; i < depend.size(); ++i)
    if (score.nodes()[i].op == Expression::Op::read && (depend[i].q || depend[i].k))
      return true;
  return false;
}

bool score_calls_functions(const AttentionSpec& spec) {
  if (!has_score(spec))
    return false;
  const std::vector<Expression::Node>& nodes = score_of(spec).nodes();
  return std::any_of(nodes.begin(), nodes.end(), [](const Expression::Node& node) {
    return node.op >= Expression::Op::tanh && node.op <= Expression::Op::pow;
  });
}

std::string mask_source(const AttentionSpec& spec) {
  return title("mask_expression.cuh", "What a query sees") +
         "#include \"tile/math/expressions.cuh\"\n\n/// " + to_string(mask_of(spec)) +
         "\nstruct Sight {\n  const Params& p;\n  int b, h;\n\n" +
         method("bool sees(int q, int k)", mask_of(spec), 0, Values::ints) +
         query_methods(mask_of(spec)) + "};\n";
}

std::string mask_ranges_source(const AttentionSpec& spec) {
  const Expression& mask = mask_of(spec);
  const bool has_floats =
      std::any_of(mask.nodes().begin(), mask.nodes().end(),
                  [](const Expression::Node& node) { return node.type == ValueType::real; });
  const char* const declaration = "Truth sees(Ints q, Ints k)";
  return title("mask_ranges.cuh", "What queries of a block see") +
         "#include \"tile/math/ranges.cuh\"\n\n/// " + to_string(mask) +
         "\nstruct SightOfBlocks {\n  const Params& p;\n  int b, h;\n\n" +
         (has_floats ? begin_method(declaration, mask, 0, Values::ranges) +
                           "    return {true, true};\n  }\n"
                     : method(declaration, mask, 0, Values::ranges)) +
         "};\n";
}

namespace {

/// The backward subtracts lse, and what it finds infinitely far below has no weight.
constexpr const char* kLimited =
    "  /// Below this the weight is 0 beside all others, and differences are finite.\n"
    "  __device__ __forceinline__ float exponent(int q, int k, float s) const {\n"
    "    return max_nan(unlimited(q, k, s), -1e30f);\n  }\n";

/// Whether a score may be farther from zero than a few products of s and positions are.
bool may_be_huge(const Expression& score) {
  using Op = Expression::Op;
  constexpr double kUsual = 1e20;
  const std::vector<Expression::Node>& nodes = score.nodes();
  return std::any_of(nodes.begin(), nodes.end(), [&](const Expression::Node& node) {
    if (node.op == Op::literal)
      return node.type == ValueType::real && !(std::abs(value_of(node)) < kUsual);
    const bool divides =
        node.op == Op::divide && nodes[static_cast<size_t>(node.inputs[1])].op != Op::literal;
    return divides || node.op == Op::read || node.op == Op::exp || node.op == Op::log ||
           node.op == Op::pow;
  });
}

} // namespace

std::string score_source(const AttentionSpec& spec, bool of_forward) {
  const size_t first = spec.mask.empty() ? 0 : mask_of(spec).operands().size();
  const Expression& score = score_of(spec);
  const Expression slope = derivative(score);
  const double unit = std::log(2.0); // of log2 in natural units
  std::set<double> factors = factors_of_s(score, unit, 1 / unit);
  factors.merge(factors_of_s(slope, unit, 1));
  ExpressionBuilder build;
  const double given = factors.size() == 1 && *factors.begin() != 0 ? *factors.begin() : 1;
  const bool limits = of_forward && may_be_huge(score);
  return title("score_expression.cuh", "What becomes of a score") +
         "#include \"tile/math/expressions.cuh\"\n\n/// " + to_string(score) +
         "\nstruct Score {\n  static constexpr float GIVEN = " +
         to_cuda(build.finish(build.literal(given))).result +
         ";\n  const Params& p;\n  int b, h;\n\n" +
         score_method(spec, limits ? "unlimited" : "exponent",
                      rescaled(score, unit, 1 / unit, given), first) +
         (limits ? kLimited : "") +
         score_method(spec, "slope", rescaled(slope, unit, 1, given), first) + "};\n";
}

} // namespace sagebwd
