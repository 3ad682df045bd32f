//===- expression_checks.cpp - Which types the parts of an expression take --===//

#include "generator/expression_checks.h"

#include "generator/nearest.h"

#include <cmath>

namespace sagebwd {
namespace {

/// The number of indices of an operand without a type, before its first ones are read.
constexpr int kNotYetKnown = 0;

} // namespace

const Notation* function_of(std::string_view name) {
  for (const Notation& notation : notations())
    if (notation.level == kCall && notation.text == name)
      return &notation;
  return nullptr;
}

std::string usage_of(const Notation& function) {
  const std::string_view inputs = function.op == Expression::Op::where ? "c, a, b"
                                  : function.op == Expression::Op::pow ? "a, c"
                                  : function.inputs == 2               ? "a, b"
                                                                       : "a";
  return std::string(function.text) + "(" + std::string(inputs) + ")";
}

void CheckedBuilder::count(const ExpressionToken& token) {
  if (++nodes_ > kMostNodes)
    tokens_.refuse(token.at, "has name, literal, operator or call " + std::to_string(nodes_) +
                                 ", and at most " + std::to_string(kMostNodes) +
                                 " are supported: read from an operand what does not fit");
}

std::string CheckedBuilder::begins(ParsedNode value) const {
  const ValueType type = type_of(value);
  return (type == ValueType::integer ? "begins an " : "begins a ") + value_text(type) + ", and ";
}

void CheckedBuilder::need_bool(ParsedNode value, std::string_view taker) const {
  if (type_of(value) != ValueType::boolean)
    tokens_.refuse(value.at,
                   begins(value) + std::string(taker) + " takes bools: compare it, as in (q == 0)");
}

void CheckedBuilder::need_number(ParsedNode value, std::string_view taker) const {
  if (type_of(value) == ValueType::boolean)
    tokens_.refuse(value.at, begins(value) + std::string(taker) +
                                 " takes ints and floats: bools are joined by & | ^ ~, and "
                                 "where(c, 1, 0) makes a number of one");
}

void CheckedBuilder::need_int(ParsedNode value, std::string_view taker) const {
  if (type_of(value) != ValueType::integer)
    tokens_.refuse(value.at, begins(value) + std::string(taker) + " takes ints" +
                                 (taker == "//" ? ": / divides floats" : ""));
}

void CheckedBuilder::need_divisor(ParsedNode value, std::string_view taker) const {
  const bool zero = is_literal(value) && value_of(build_[value.node]) == 0;
  if (zero || !is_literal(value))
    tokens_.refuse(value.at, std::string(zero ? "begins a 0" : "begins no constant") + ", and " +
                                 std::string(taker) +
                                 " divides by a constant other than 0: choose one, or divide "
                                 "floats by /");
}

void CheckedBuilder::check_function(const Notation& function, size_t at,
                                    const std::vector<ParsedNode>& inputs) const {
  if (inputs.size() != static_cast<size_t>(function.inputs))
    tokens_.refuse(
        at, "has " + std::string(function.text) + " of " + std::to_string(inputs.size()) +
                (inputs.size() == 1 ? " value" : " values") + ": write " + usage_of(function));
  if (function.op == Op::where) {
    need_bool(inputs[0], "the condition of where");
    if (type_of(inputs[1]) == ValueType::boolean)
      need_bool(inputs[2], "where, if its other choice is a bool,");
    else
      need_number(inputs[2], "where, if its other choice is a number,");
    return;
  }
  for (ParsedNode input : inputs)
    need_number(input, function.text);
  if (function.op == Op::pow && !is_literal(inputs[1]))
    tokens_.refuse(inputs[1].at, "begins no constant, and pow takes constant exponents: write "
                                 "exp(c * log(a))");
}

ParsedNode CheckedBuilder::operation(const Notation& notation, size_t at,
                                     const std::vector<ParsedNode>& inputs) {
  const bool of_ints = notation.op == Op::floor_divide || notation.op == Op::modulo;
  if (notation.level == kCall)
    check_function(notation, at, inputs);
  else
    for (ParsedNode input : inputs)
      if (notation.level < kComparison || notation.op == Op::invert)
        need_bool(input, notation.text);
      else if (of_ints)
        need_int(input, notation.text);
      else
        need_number(input, notation.text);
  if (of_ints)
    need_divisor(inputs[1], notation.text);
  std::array<int, 3> nodes = {Expression::kNone, Expression::kNone, Expression::kNone};
  std::ranges::transform(inputs, nodes.begin(), &ParsedNode::node);
  const ParsedNode made = {build_.apply(notation.op, nodes[0], nodes[1], nodes[2]), at};
  refuse_nan(notation.op, made, inputs);
  return made;
}

void CheckedBuilder::refuse_nan(Op op, ParsedNode made,
                                const std::vector<ParsedNode>& inputs) const {
  double values[3] = {};
  if (!std::ranges::all_of(inputs, [&](ParsedNode input) { return is_literal(input); }))
    return;
  std::ranges::transform(inputs, values,
                         [&](ParsedNode input) { return value_of(build_[input.node]); });
  if (std::isnan(computed(op, type_of(made), values[0], values[1], values[2])))
    tokens_.refuse(made.at, "begins a constant that is NaN, which is no number of an expression: a "
                            "mask hides keys");
}

void CheckedBuilder::check_new_operand(const ExpressionToken& name) const {
  const std::string has = "has '" + std::string(name.text) + "'";
  const auto is_ours = [](char c) { return c < 'A' || c > 'Z'; }; // among those of a word
  if (name.text.size() > kLongestOperandName || name.text[0] == '_' ||
      !std::ranges::all_of(name.text, is_ours))
    tokens_.refuse(name.at, has + ", and an operand's name is a letter and up to " +
                                std::to_string(kLongestOperandName - 1) +
                                " letters, digits and '_', with letters from a to z: rename it");
  if (build_.operands.size() == kMostOperands)
    tokens_.refuse(name.at, has + ", another operand, and at most " +
                                std::to_string(kMostOperands) +
                                " are supported: join some of them in one tensor");
  if (!types_ || types_->contains(name.text))
    return;
  std::vector<std::string> known;
  for (const auto& [other, type] : *types_)
    known.push_back(other);
  const std::string meant = nearest(name.text, known);
  tokens_.refuse(name.at, has + ", which is no operand here" +
                              (meant.empty() ? "" : " (did you mean '" + meant + "'?)") +
                              (known.empty() ? ": there are none" : ": the operands are ") +
                              joined(known, ", "));
}

int CheckedBuilder::operand(const ExpressionToken& name) {
  std::vector<ExpressionOperand>& operands = build_.operands;
  const auto found = std::ranges::find(operands, name.text, &ExpressionOperand::name);
  if (found != operands.end())
    return static_cast<int>(found - operands.begin());
  check_new_operand(name);
  const OperandType untold = {score_ ? ValueType::real : ValueType::integer, kNotYetKnown};
  operands.push_back({std::string(name.text), types_ ? types_->find(name.text)->second : untold});
  return static_cast<int>(operands.size()) - 1;
}

ParsedNode CheckedBuilder::read(int operand, const ExpressionToken& name,
                                const std::vector<ParsedNode>& indices) {
  for (ParsedNode index : indices)
    need_int(index, "an index");
  OperandType& type = build_.operands[static_cast<size_t>(operand)].type;
  const int count = static_cast<int>(indices.size());
  const bool first = type.indices == kNotYetKnown;
  if (first && count <= 2)
    type.indices = count;
  if (type.indices != count)
    tokens_.refuse(name.at, "has '" + std::string(name.text) + "' with " + std::to_string(count) +
                                (count == 1 ? " index" : " indices") + ", and it takes " +
                                (first    ? "1 or 2"
                                 : types_ ? std::to_string(type.indices)
                                          : std::to_string(type.indices) + ", as before"));
  return {build_.add({.op = Op::read,
                      .type = type.type,
                      .value = operand,
                      .inputs = {indices[0].node, count == 2 ? indices[1].node : Expression::kNone,
                                 Expression::kNone}}),
          name.at};
}

Expression CheckedBuilder::finished(ParsedNode whole) const {
  const ValueType type = type_of(whole);
  if (!score_ && type != ValueType::boolean)
    tokens_.refuse(whole.at, begins(whole) + "a mask is a bool: compare it, as in q - k < 512");
  if (score_ && type != ValueType::real)
    tokens_.refuse(whole.at,
                   begins(whole) + "a score function is a float: " +
                       (type == ValueType::integer ? "write float(...)" : "a mask hides keys"));
  Expression expression = build_.finish(whole.node);
  if (score_ && !dependence(expression).s)
    tokens_.refuse(whole.at, "begins a score function without the score s, which it changes: write "
                             "s + bias[h], say");
  return expression;
}

} // namespace sagebwd
