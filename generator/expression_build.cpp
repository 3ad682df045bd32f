//===- expression_build.cpp - Building and folding expressions --------------===//

#include "generator/expression_build.h"

#include <bit>
#include <cmath>

namespace sagebwd {
namespace {

using Op = Expression::Op;
using Node = Expression::Node;

constexpr Notation kNotations[] = {
    {Op::one_of, "|", 1, 2},         {Op::differ, "^", 2, 2},
    {Op::both, "&", 3, 2},           {Op::equal, "==", kComparison, 2},
    {Op::not_equal, "!=", 4, 2},     {Op::less, "<", 4, 2},
    {Op::less_equal, "<=", 4, 2},    {Op::greater, ">", 4, 2},
    {Op::greater_equal, ">=", 4, 2}, {Op::add, "+", 5, 2},
    {Op::subtract, "-", 5, 2},       {Op::multiply, "*", 6, 2},
    {Op::divide, "/", 6, 2},         {Op::floor_divide, "//", 6, 2},
    {Op::modulo, "%", 6, 2},         {Op::negate, "-", kUnary, 1},
    {Op::invert, "~", kUnary, 1},    {Op::least, "min", kCall, 2},
    {Op::greatest, "max", kCall, 2}, {Op::absolute, "abs", kCall, 1},
    {Op::where, "where", kCall, 3},  {Op::tanh, "tanh", kCall, 1},
    {Op::exp, "exp", kCall, 1},      {Op::log, "log", kCall, 1},
    {Op::sqrt, "sqrt", kCall, 1},    {Op::sigmoid, "sigmoid", kCall, 1},
    {Op::pow, "pow", kCall, 2},      {Op::to_float, "float", kCall, 1},
};

/// Whether the last bit of the result depends on the machine's library of functions.
bool is_inexact(Op op) {
  return op == Op::tanh || op == Op::exp || op == Op::log || op == Op::sigmoid || op == Op::pow;
}
bool takes_floats(Op op) { return is_inexact(op) || op == Op::sqrt || op == Op::divide; }

ValueType result_of(const Notation& notation, ValueType last_input) {
  if (notation.level <= kComparison || notation.op == Op::invert)
    return ValueType::boolean;
  return notation.op == Op::to_float ? ValueType::real : last_input;
}

int32_t wrapped(int64_t value) { return static_cast<int32_t>(static_cast<uint32_t>(value)); }

/// An operation on ints whose result is an int.
int32_t computed_int(Op op, int64_t a, int64_t b) {
  const auto remainder = [&] { return (a % b + b) % b; };
  switch (op) {
  case Op::add:
    return wrapped(a + b);
  case Op::subtract:
    return wrapped(a - b);
  case Op::multiply:
    return wrapped(a * b);
  case Op::floor_divide:
    return wrapped((a - remainder()) / b);
  case Op::modulo:
    return wrapped(remainder());
  case Op::negate:
    return wrapped(-a);
  default: // absolute
    return wrapped(a < 0 ? -a : a);
  }
}

} // namespace

std::span<const Notation> notations() { return kNotations; }

const Notation* notation_of(Op op) {
  for (const Notation& notation : kNotations)
    if (notation.op == op)
      return &notation;
  return nullptr;
}

double value_of(const Node& literal) {
  if (literal.type == ValueType::real)
    return std::bit_cast<float>(literal.value);
  return literal.value;
}

double computed(Op op, ValueType type, double a, double b, double c) {
  switch (op) {
  case Op::one_of:
    return a != 0 || b != 0;
  case Op::differ:
  case Op::not_equal:
    return a != b;
  case Op::both:
    return a != 0 && b != 0;
  case Op::equal:
    return a == b;
  case Op::less:
    return a < b;
  case Op::less_equal:
    return a <= b;
  case Op::greater:
    return a > b;
  case Op::greater_equal:
    return a >= b;
  case Op::invert:
    return a == 0;
  case Op::least:
    return b < a ? b : a;
  case Op::greatest:
    return a < b ? b : a;
  case Op::where:
    return a != 0 ? b : c;
  case Op::to_float:
    return a;
  default:
    break;
  }
  if (type == ValueType::integer)
    return computed_int(op, static_cast<int32_t>(a), static_cast<int32_t>(b));
  switch (op) {
  case Op::add:
    return a + b;
  case Op::subtract:
    return a - b;
  case Op::multiply:
    return a * b;
  case Op::divide:
    return a / b;
  case Op::negate:
    return -a;
  case Op::absolute:
    return std::abs(a);
  case Op::tanh:
    return std::tanh(a);
  case Op::exp:
    return std::exp(a);
  case Op::log:
    return std::log(a);
  case Op::sqrt:
    return std::sqrt(a);
  case Op::sigmoid:
    return 1 / (1 + std::exp(-a));
  default:
    return std::pow(a, b);
  }
}

int ExpressionBuilder::add(const Node& node) {
  const auto [found, fresh] = numbers_.emplace(node, static_cast<int>(nodes_.size()));
  if (fresh)
    nodes_.push_back(node);
  return found->second;
}

int ExpressionBuilder::literal(bool value) {
  return add({.op = Op::literal, .type = ValueType::boolean, .value = value});
}
int ExpressionBuilder::literal(int32_t value) {
  return add({.op = Op::literal, .type = ValueType::integer, .value = value});
}
int ExpressionBuilder::literal(double value) {
  return add({.op = Op::literal,
              .type = ValueType::real,
              .value = std::bit_cast<int32_t>(static_cast<float>(value))});
}
int ExpressionBuilder::name(PointName name) {
  return add({.op = Op::name,
              .type = name == PointName::s ? ValueType::real : ValueType::integer,
              .value = static_cast<int32_t>(name)});
}

int ExpressionBuilder::apply(Op op, int a, int b, int c) {
  const auto is_real = [&](int node) { return (*this)[node].type == ValueType::real; };
  if (op == Op::to_float && is_real(a))
    return a;
  int inputs[] = {a, b, c};
  const Notation& notation = *notation_of(op);
  const std::span used(inputs, static_cast<size_t>(notation.inputs));
  const std::span sides = used.subspan(op == Op::where ? 1 : 0);
  if (op != Op::to_float && (takes_floats(op) || std::ranges::any_of(sides, is_real)))
    for (int& side : sides)
      side = promoted(side);
  const Node node = {.op = op,
                     .type = result_of(notation, (*this)[used.back()].type),
                     .value = 0,
                     .inputs = {inputs[0], inputs[1], inputs[2]}};
  if (is_inexact(op) ||
      !std::ranges::all_of(used, [&](int input) { return (*this)[input].op == Op::literal; }))
    return add(node);
  double values[3] = {};
  std::ranges::transform(used, values, [&](int input) { return value_of((*this)[input]); });
  // FP64 has more than twice the digits of FP32: rounding its result is rounding once.
  const double folded = computed(op, node.type, values[0], values[1], values[2]);
  if (std::isnan(folded)) // which no literal says
    return add(node);
  if (node.type == ValueType::real)
    return literal(folded);
  return node.type == ValueType::integer ? literal(static_cast<int32_t>(folded))
                                         : literal(folded != 0);
}

// This cannot run out of stack, because texts nest so little. Each level of a chain, as in
// a + b + c, is a node. A text has at most kMostNodes of them, and a derivative has a few for each.
Expression ExpressionBuilder::finish(int result) const {
  Expression done;
  std::vector<int> places(nodes_.size(), Expression::kNone),
      operand_places(operands.size(), Expression::kNone);
  const auto copy = [&](const auto& self, int number) -> int {
    int& place = places[static_cast<size_t>(number)];
    if (place != Expression::kNone)
      return place;
    Node node = (*this)[number];
    if (node.op == Op::read) { // the operand comes before its indices
      int& operand = operand_places[static_cast<size_t>(node.value)];
      if (operand == Expression::kNone) {
        operand = static_cast<int>(done.operands_.size());
        done.operands_.push_back(operands[static_cast<size_t>(node.value)]);
      }
      node.value = operand;
    }
    for (int& input : node.inputs)
      if (input != Expression::kNone)
        input = self(self, input);
    done.nodes_.push_back(node);
    return place = static_cast<int>(done.nodes_.size()) - 1;
  };
  copy(copy, result);
  return done;
}

} // namespace sagebwd
