//===- expression_print.cpp - Canonical text and CUDA of expressions --------===//

#include "generator/expression_build.h"

#include <cmath>

namespace sagebwd {
namespace {

using Op = Expression::Op;
using Node = Expression::Node;

template <typename... Format> std::string number_text(auto value, Format... format) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof(text), value, format...).ptr};
}

std::string literal_text(const Node& literal) {
  if (literal.type == ValueType::boolean)
    return literal.value ? "true" : "false";
  if (literal.type == ValueType::integer)
    return number_text(literal.value);
  std::string text = number_text(static_cast<float>(value_of(literal)));
  if (text.find_first_of(".en") == std::string::npos) // an int would be read
    text += ".0";
  return text;
}

/// Writes the canonical text. Its recursion is as deep as that of ExpressionBuilder::finish().
class CanonicalText {
public:
  explicit CanonicalText(const Expression& expression) : expression_(expression) {
    write(node(static_cast<int>(expression.nodes().size()) - 1), 0);
  }
  std::string text;

private:
  const Node& node(int number) const { return expression_.nodes()[static_cast<size_t>(number)]; }

  /// An input, or what float() has made a float of, where the parser does so without being told.
  const Node& told(const Node& parent, size_t input) const {
    const Node& given = node(parent.inputs[input]);
    if (given.op != Op::to_float || parent.op == Op::negate || parent.op == Op::absolute)
      return given;
    const int next =
        input + 1 < parent.inputs.size() ? parent.inputs[input + 1] : Expression::kNone;
    const bool both =
        next != Expression::kNone && node(next).op == Op::to_float && parent.op != Op::divide;
    return both ? given : node(given.inputs[0]);
  }

  void write_inputs(const Node& parent, char open, char close) {
    text += open;
    for (size_t i = 0; i < parent.inputs.size() && parent.inputs[i] != Expression::kNone; ++i) {
      text += i ? ", " : "";
      write(told(parent, i), 0);
    }
    text += close;
  }

  /// Writes a node, in brackets if its operator binds less tightly than `level`.
  void write(const Node& n, int level) {
    const Notation* notation = notation_of(n.op);
    if (n.op == Op::literal) {
      text += literal_text(n);
    } else if (n.op == Op::name) {
      text += to_string(static_cast<PointName>(n.value));
    } else if (n.op == Op::read) {
      text += expression_.operands()[static_cast<size_t>(n.value)].name;
      write_inputs(n, '[', ']');
    } else if (notation->level == kCall) {
      text += notation->text;
      write_inputs(n, '(', ')');
    } else {
      const bool brackets = notation->level < level;
      text += brackets ? "(" : "";
      if (notation->level < kUnary) {
        write(told(n, 0), notation->level);
        text += " " + std::string(notation->text) + " ";
        write(told(n, 1), notation->level + 1);
      } else {
        text += notation->text;
        write(told(n, 0), kUnary);
      }
      text += brackets ? ")" : "";
    }
  }

  const Expression& expression_;
};

/// A literal in C++, where "-2147483648" would be no int.
std::string cuda_literal(const Node& literal) {
  const double value = value_of(literal);
  const std::string sign = std::signbit(value) ? "-" : "";
  if (literal.type == ValueType::boolean)
    return literal_text(literal);
  if (literal.type == ValueType::integer)
    return literal.value == INT32_MIN ? "(-2147483647 - 1)" : literal_text(literal);
  if (std::isinf(value))
    return sign + "infinity()";
  return sign + "0x" + number_text(static_cast<float>(std::abs(value)), std::chars_format::hex) +
         "f";
}

/// The function that stands for an operation; empty if C++ has an operator for it.
std::string_view helper_of(const Node& n) {
  const bool of_ints = n.type == ValueType::integer;
  switch (n.op) {
  case Op::add:
    return of_ints ? "wrap_add" : "";
  case Op::subtract:
    return of_ints ? "wrap_sub" : "";
  case Op::multiply:
    return of_ints ? "wrap_mul" : "";
  case Op::negate:
    return of_ints ? "wrap_neg" : "";
  case Op::absolute:
    return of_ints ? "wrap_abs" : "abs_of";
  case Op::divide:
    return "quotient";
  case Op::floor_divide:
    return "floor_div";
  case Op::modulo:
    return "floor_mod";
  case Op::least:
    return "min_of";
  case Op::greatest:
    return "max_of";
  case Op::tanh:
    return "tanh_of";
  case Op::exp:
    return "exp_of";
  case Op::log:
    return "log_of";
  case Op::sqrt:
    return "sqrt_of";
  case Op::sigmoid:
    return "sigmoid_of";
  case Op::pow:
    return "pow_of";
  case Op::to_float:
    return "to_float";
  default:
    return "";
  }
}

/// An operation on inputs that are each a name, a call, a literal or in parentheses.
std::string cuda_operation(const Expression& expression, const Node& n,
                           const std::vector<std::string>& inputs, bool of_ranges) {
  const std::string listed = joined(inputs, ", ");
  if (n.op == Op::read)
    return "read_" + expression.operands()[static_cast<size_t>(n.value)].name + "(" + listed + ")";
  if (const std::string_view helper = helper_of(n); !helper.empty())
    return std::string(helper) + "(" + listed + ")";
  if (n.op == Op::where && of_ranges)
    return (n.type == ValueType::boolean ? "choose_truth(" : "choose(") + listed + ")";
  if (n.op == Op::where)
    return inputs[0] + " ? " + inputs[1] + " : " + inputs[2];
  if (n.op == Op::invert || n.op == Op::negate)
    return (n.op == Op::invert ? "!" : "-") + inputs[0];
  return inputs[0] + " " + std::string(notation_of(n.op)->text) + " " + inputs[1];
}
bool is_call(const Node& n) { return n.op == Op::read || !helper_of(n).empty(); }

/// An input with a longer text becomes a constant, so that no parentheses nest deeply.
constexpr size_t kLongestInput = 60;

std::string cuda_type(ValueType type, bool of_ranges) {
  if (of_ranges)
    return type == ValueType::boolean ? "Truth" : "Ints";
  return std::string(to_string(type));
}

/// What is printed of an expression: a node with what it holds, where some nodes have texts.
struct Part {
  size_t root;
  std::map<size_t, std::string> given = {};
  PointVariables variables = {};
  bool of_ranges = false;
};

/// How often each node is an input of those that a part prints; the root counts as used.
std::vector<int> uses_of(const Expression& expression, const Part& part) {
  const std::vector<Node>& nodes = expression.nodes();
  std::vector<int> uses(nodes.size());
  uses[part.root] = 1;
  for (size_t i = part.root + 1; i-- > 0;)
    if (uses[i] > 0 && !part.given.contains(i))
      for (int input : nodes[i].inputs)
        if (input != Expression::kNone)
          ++uses[static_cast<size_t>(input)];
  return uses;
}

CudaText printed(const Expression& expression, const Part& part) {
  const PointVariables& variables = part.variables;
  const std::string* const names[] = {&variables.b, &variables.h, &variables.q, &variables.k,
                                      &variables.s};
  const std::vector<int> uses = uses_of(expression, part);
  CudaText cuda;
  int constants = 0;
  std::vector<std::string> texts(part.root + 1);
  for (size_t i = 0; i <= part.root; ++i) {
    const Node& n = expression.nodes()[i];
    if (uses[i] == 0)
      continue;
    if (const auto given = part.given.find(i); given != part.given.end()) {
      texts[i] = given->second;
      continue;
    }
    if (n.op == Op::literal || n.op == Op::name) {
      texts[i] = n.op == Op::literal ? cuda_literal(n) : *names[n.value];
      continue;
    }
    std::vector<std::string> inputs;
    for (int input : n.inputs)
      if (input != Expression::kNone)
        inputs.push_back(texts[static_cast<size_t>(input)]);
    std::string text = cuda_operation(expression, n, inputs, part.of_ranges);
    const bool is_root = i == part.root;
    if (uses[i] > 1 || (!is_root && text.size() > kLongestInput)) {
      const std::string name = "t" + std::to_string(constants++);
      cuda.statements +=
          "const " + cuda_type(n.type, part.of_ranges) + " " + name + " = " + text + ";\n";
      text = name;
    } else if (!is_root && !is_call(n)) {
      text = "(" + text + ")";
    }
    texts[i] = std::move(text);
  }
  cuda.result = texts.back();
  return cuda;
}

} // namespace

std::string to_string(const Expression& expression) { return CanonicalText(expression).text; }

CudaText to_cuda(const Expression& expression, const PointVariables& variables) {
  return printed(expression, {expression.nodes().size() - 1, {}, variables});
}
CudaText to_cuda_of_ranges(const Expression& expression) {
  return printed(expression, {expression.nodes().size() - 1, {}, {}, true});
}
CudaText to_cuda_of_node(const Expression& expression, size_t node) {
  return printed(expression, {node});
}
CudaText to_cuda_beside(const Expression& expression, const std::map<size_t, std::string>& given) {
  return printed(expression, {expression.nodes().size() - 1, given});
}

std::vector<size_t> reads_of_query(const Expression& expression) {
  const std::vector<Dependence> depend = dependences(expression);
  Part part = {expression.nodes().size() - 1};
  for (size_t i = 0; i < depend.size(); ++i)
    if (expression.nodes()[i].op == Op::read && depend[i].q && !depend[i].k)
      part.given[i] = "";
  const std::vector<int> uses = uses_of(expression, part);
  std::vector<size_t> reads;
  for (const auto& [node, text] : part.given)
    if (uses[node] > 0)
      reads.push_back(node);
  return reads;
}

} // namespace sagebwd
