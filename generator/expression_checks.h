//===- expression_checks.h - Which types the parts of an expression take ----===//
#pragma once

#include "generator/expression_build.h"
#include "generator/expression_tokens.h"

namespace sagebwd {

/// A node, and how many characters are before its text.
struct ParsedNode {
  int node = Expression::kNone;
  size_t at = 0;
};

/// The function of this name, or null. usage_of() shows its values.
const Notation* function_of(std::string_view name);
std::string usage_of(const Notation& function);

/// Builds the expression that a parser reads. Its functions raise SpecError, which names a column,
/// for what has a type that is not taken there, or passes a limit.
class CheckedBuilder {
public:
  CheckedBuilder(const ExpressionTokens& tokens, bool score, const OperandTypes* types)
      : tokens_(tokens), score_(score), types_(types) {}

  /// Counts a token that is a name, a literal, an operator or a call.
  void count(const ExpressionToken&);
  ParsedNode literal(auto value, size_t at) { return {build_.literal(value), at}; }
  ParsedNode name(PointName name, size_t at) { return {build_.name(name), at}; }
  /// An operator or a function, whose text begins at `at`.
  ParsedNode operation(const Notation&, size_t at, const std::vector<ParsedNode>& inputs);
  /// The number of an operand, for read().
  int operand(const ExpressionToken& name);
  ParsedNode read(int operand, const ExpressionToken& name, const std::vector<ParsedNode>& indices);
  Expression finished(ParsedNode whole) const;

private:
  using Op = Expression::Op;

  ValueType type_of(ParsedNode value) const { return build_[value.node].type; }
  bool is_literal(ParsedNode value) const { return build_[value.node].op == Op::literal; }
  std::string begins(ParsedNode) const; ///< as in "begins an int, and "
  void need_bool(ParsedNode, std::string_view taker) const;
  void need_number(ParsedNode, std::string_view taker) const;
  void need_int(ParsedNode, std::string_view taker) const;
  void need_divisor(ParsedNode, std::string_view taker) const;
  void refuse_nan(Op, ParsedNode made, const std::vector<ParsedNode>& inputs) const;
  void check_function(const Notation&, size_t at, const std::vector<ParsedNode>& inputs) const;
  void check_new_operand(const ExpressionToken& name) const;

  const ExpressionTokens& tokens_;
  bool score_;
  const OperandTypes* types_;
  ExpressionBuilder build_;
  size_t nodes_ = 0;
};

} // namespace sagebwd
