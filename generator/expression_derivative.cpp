//===- expression_derivative.cpp - Derivatives with respect to the score ----===//

#include "generator/expression_build.h"

#include <cmath>

namespace sagebwd {
namespace {

using Op = Expression::Op;
using Node = Expression::Node;

/// Adds derivatives of nodes to a builder that has the nodes. All are floats.
class Differentiator {
public:
  explicit Differentiator(ExpressionBuilder& builder) : build_(builder) {}

  int constant(double value) { return build_.literal(value); }

  /// The derivative of a node whose inputs have the given derivatives.
  int derivative(int node, const std::array<int, 3>& inputs) {
    const Node n = build_[node]; // a copy: nodes move when others are added
    const auto [a, b, c] = n.inputs;
    const auto [da, db, dc] = inputs;
    switch (n.op) {
    case Op::name:
      return constant(n.value == static_cast<int32_t>(PointName::s));
    case Op::add:
      return sum(da, db);
    case Op::subtract:
      return difference(da, db);
    case Op::multiply:
      return sum(product(da, b), product(a, db));
    case Op::divide: // f / b has no square of b, which could overflow
      return quotient(difference(da, product(node, db)), b);
    case Op::negate:
      return negated(da);
    case Op::least:
      return chosen(build_.apply(Op::less, b, a), db, da);
    case Op::greatest:
      return chosen(build_.apply(Op::less, a, b), db, da);
    case Op::absolute:
      return chosen(build_.apply(Op::less, a, constant(0)), negated(da), da);
    case Op::where:
      return chosen(a, db, dc);
    case Op::tanh:
      return product(difference(constant(1), product(node, node)), da);
    case Op::exp:
      return product(node, da);
    case Op::log:
      return quotient(da, a);
    case Op::sqrt:
      return quotient(da, product(constant(2), node));
    case Op::sigmoid:
      return product(product(node, difference(constant(1), node)), da);
    case Op::pow:
      return product(product(b, power(a, value_of(build_[b]) - 1)), da);
    default: // literals, operands and ints
      return constant(0);
    }
  }

private:
  bool is(int node, double value) const {
    return build_[node].op == Op::literal && value_of(build_[node]) == value;
  }
  bool is_literal(int node) const { return build_[node].op == Op::literal; }

  int sum(int a, int b) {
    if (is(a, 0))
      return b;
    return is(b, 0) ? a : build_.apply(Op::add, a, b);
  }
  int difference(int a, int b) {
    if (is(b, 0))
      return a;
    return is(a, 0) ? negated(b) : build_.apply(Op::subtract, a, b);
  }
  int negated(int a) {
    if (is(a, 0)) // not -0
      return a;
    return build_[a].op == Op::negate ? build_[a].inputs[0] : build_.apply(Op::negate, a);
  }
  /// Constants come first, and two of them become one.
  int product(int a, int b) {
    if (is(a, 0) || is(b, 0))
      return constant(0);
    if (is_literal(b))
      std::swap(a, b);
    if (is(a, 1))
      return b;
    if (is(a, -1))
      return negated(b);
    const Node right = build_[b];
    if (is_literal(a) && right.op == Op::multiply && is_literal(right.inputs[0])) {
      const double both = value_of(build_[a]) * value_of(build_[right.inputs[0]]);
      if (std::isnormal(static_cast<float>(both))) // else the other factor may make up for it
        return product(constant(both), right.inputs[1]);
    }
    return build_.apply(Op::multiply, a, b);
  }
  int quotient(int a, int b) {
    if (is(a, 0) || is(b, 1))
      return a;
    const double inverse = is_literal(b) ? 1 / value_of(build_[b]) : 0;
    if (std::isnormal(static_cast<float>(inverse)))
      return product(constant(inverse), a);
    return build_.apply(Op::divide, a, b);
  }
  int power(int a, double exponent) {
    if (exponent == 0)
      return constant(1);
    return exponent == 1 ? a : build_.apply(Op::pow, a, constant(exponent));
  }
  int chosen(int condition, int a, int b) {
    if (a == b)
      return a;
    if (is_literal(condition))
      return is(condition, 1) ? a : b;
    return build_.apply(Op::where, condition, a, b);
  }

  ExpressionBuilder& build_;
};

} // namespace

Expression derivative(const Expression& expression) {
  ExpressionBuilder builder;
  builder.operands = expression.operands();
  Differentiator differentiator(builder);
  // Equal nodes have one number, so that these keep theirs.
  for (const Node& n : expression.nodes())
    builder.add(n);
  const std::vector<Dependence> depends = dependences(expression);
  std::vector<int> derivatives;
  for (size_t i = 0; i < expression.nodes().size(); ++i) {
    std::array<int, 3> inputs = expression.nodes()[i].inputs;
    for (int& input : inputs)
      input =
          input == Expression::kNone ? Expression::kNone : derivatives[static_cast<size_t>(input)];
    const bool constant = !depends[i].s || expression.nodes()[i].type != ValueType::real;
    derivatives.push_back(constant ? differentiator.constant(0)
                                   : differentiator.derivative(static_cast<int>(i), inputs));
  }
  return builder.finish(derivatives.back());
}

} // namespace sagebwd
