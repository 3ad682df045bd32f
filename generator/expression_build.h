//===- expression_build.h - What parser, derivative and printers share ------===//
#pragma once

#include "generator/expression.h"

#include <span>

namespace sagebwd {

/// How a text has an operation.
struct Notation {
  Expression::Op op;
  std::string_view text; ///< an operator, or the name of a function
  int level;             ///< of two operators the one with the higher level binds more tightly
  int inputs;
};
/// Levels of operators with two sides are 1 to kUnary - 1. Whatever needs no brackets has kCall.
inline constexpr int kComparison = 4, kUnary = 7, kCall = 8;
/// All operators and functions.
std::span<const Notation> notations();
/// The one of an operation; null for a literal, a name and a read.
const Notation* notation_of(Expression::Op);

/// A literal's value: an int, a float in FP32, 0 or 1.
double value_of(const Expression::Node&);
/// The result of an operation whose result has this type, in FP64 or int32. Operations with fewer
/// inputs ignore the last ones.
double computed(Expression::Op, ValueType, double a, double b, double c);

/// Which names each node depends on.
std::vector<Dependence> dependences(const Expression&);

/// Builds an expression from the leaves up. Nodes are numbered, and equal ones have one number.
class ExpressionBuilder {
public:
  using Op = Expression::Op;
  using Node = Expression::Node;

  const Node& operator[](int node) const { return nodes_[static_cast<size_t>(node)]; }

  int literal(bool);
  int literal(int32_t);
  int literal(double); ///< rounded to FP32
  int name(PointName);
  /// Adds an operation, or the literal that it folds to. An int becomes a float where the operation
  /// takes floats or the other side is one; otherwise inputs must have types that it takes.
  int apply(Op, int a, int b = Expression::kNone, int c = Expression::kNone);
  int promoted(int node) { return apply(Op::to_float, node); }
  /// Adds any node as it is.
  int add(const Node&);

  std::vector<ExpressionOperand> operands; ///< numbered by nodes that read them

  /// The expression of what a node needs, with nodes and operands in the order of its text.
  Expression finish(int result) const;

private:
  std::vector<Node> nodes_;
  std::map<Node, int> numbers_;
};

} // namespace sagebwd
