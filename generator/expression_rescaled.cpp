//===- expression_rescaled.cpp - Scores in other units ----------------------===//

#include "generator/expression_build.h"

#include <cmath>

namespace sagebwd {
namespace {

using Op = Expression::Op;
using Node = Expression::Node;

/// Floats tell ints from their neighbours up to here. Positions are below it.
constexpr double kExact = 1 << 24;

/// Rewrites nodes for an s that counts in units of `unit` and comes times `given`. Each node is
/// rewritten times a factor that moves to where it costs least: to constants, or to s.
class Rescaler {
public:
  Rescaler(const Expression& expression, double unit, double given = 1)
      : expression_(expression), depends_(dependences(expression)), unit_(unit), given_(given) {
    build.operands = expression.operands();
  }

  /// The number of `factor` times a node. Recursion is as deep as that of
  /// ExpressionBuilder::finish().
  int times(double factor, int number) {
    const auto key = std::pair(factor, number);
    if (const auto found = done_.find(key); found != done_.end())
      return found->second;
    return done_[key] = rewritten(factor, number);
  }

  ExpressionBuilder build;
  std::set<double> factors_of_s; ///< by which what was rewritten multiplies s where it takes it

private:
  const Node& node(int number) const { return expression_.nodes()[static_cast<size_t>(number)]; }
  bool is_literal(int number) const { return node(number).op == Op::literal; }

  int multiplied(double factor, int built) {
    return factor == 1 ? built : build.apply(Op::multiply, build.literal(factor), built);
  }

  int rewritten(double factor, int number) {
    const Node& n = node(number);
    const auto [a, b, c] = n.inputs;
    if (n.type == ValueType::real)
      switch (n.op) {
      case Op::literal:
        return build.literal(factor * value_of(n));
      case Op::name:
        factors_of_s.insert(factor * unit_);
        return multiplied(factor * unit_ / given_, build.name(PointName::s));
      case Op::to_float:
        return multiplied(factor, is_of_positions(a) ? of_floats(a) : copied(n));
      case Op::add:
      case Op::subtract:
        return build.apply(n.op, times(factor, a), times(factor, b));
      case Op::negate:
        return times(-factor, a);
      case Op::multiply: {
        const bool to_right = is_literal(b) || (!is_literal(a) && !of_s(a) && of_s(b));
        if (is_literal(a) && of_s(b)) // both may vanish, or meet a constant further in
          return times(factor * value_of(node(a)), b);
        if (is_literal(b) && of_s(a))
          return times(factor * value_of(node(b)), a);
        return build.apply(n.op, times(to_right ? 1 : factor, a), times(to_right ? factor : 1, b));
      }
      case Op::divide:
        if (is_literal(b) && value_of(node(b)) != 0)
          return times(factor / value_of(node(b)), a);
        return build.apply(n.op, times(factor, a), times(1, b));
      case Op::least:
      case Op::greatest:
        if (factor > 0)
          return build.apply(n.op, times(factor, a), times(factor, b));
        break;
      case Op::where:
        return build.apply(n.op, times(1, a), times(factor, b), times(factor, c));
      default:
        break;
      }
    return multiplied(factor, copied(n));
  }
  /// Whether an int is a sum of positions and small constants, or the like.
  bool is_of_positions(int number) const {
    const Node& n = node(number);
    switch (n.op) {
    case Op::add:
    case Op::subtract:
      return is_of_positions(n.inputs[0]) && is_of_positions(n.inputs[1]);
    case Op::negate:
    case Op::absolute:
      return is_of_positions(n.inputs[0]);
    case Op::literal:
      return std::abs(static_cast<double>(n.value)) <= kExact;
    default:
      return n.op == Op::name;
    }
  }
  /// Such an int as a float. Many scores share a position's conversion, and none the sum's.
  int of_floats(int number) {
    const Node n = node(number);
    const auto [a, b, c] = n.inputs;
    switch (n.op) {
    case Op::add:
    case Op::subtract:
      return build.apply(n.op, of_floats(a), of_floats(b));
    case Op::negate:
    case Op::absolute:
      return build.apply(n.op, of_floats(a));
    default:
      return build.promoted(copied(n));
    }
  }
  bool of_s(int number) const { return depends_[static_cast<size_t>(number)].s; }

  /// The node as it is, of rewritten inputs.
  int copied(Node n) {
    for (int& input : n.inputs)
      if (input != Expression::kNone)
        input = times(1, input);
    return build.add(n);
  }

  const Expression& expression_;
  std::vector<Dependence> depends_;
  double unit_, given_;
  std::map<std::pair<double, int>, int> done_;
};

} // namespace

std::set<double> factors_of_s(const Expression& expression, double unit, double factor) {
  Rescaler rescaler(expression, unit);
  rescaler.times(factor, static_cast<int>(expression.nodes().size()) - 1);
  return rescaler.factors_of_s;
}

Expression rescaled(const Expression& expression, double unit, double factor, double given) {
  Rescaler rescaler(expression, unit, given);
  const int result = rescaler.times(factor, static_cast<int>(expression.nodes().size()) - 1);
  return rescaler.build.finish(result);
}

} // namespace sagebwd
