//===- expression_rescaled.cpp - Scores in other units ----------------------===//

#include "generator/expression_build.h"

namespace sagebwd {
namespace {

using Op = Expression::Op;
using Node = Expression::Node;

/// Rewrites nodes for an s that counts in units of `unit`, each times a factor that moves to where
/// it costs least: to constants, or to s.
class Rescaler {
public:
  Rescaler(const Expression& expression, double unit)
      : expression_(expression), depends_(dependences(expression)), unit_(unit) {
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
        return multiplied(factor * unit_, build.name(PointName::s));
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
  double unit_;
  std::map<std::pair<double, int>, int> done_;
};

} // namespace

Expression rescaled(const Expression& expression, double unit, double factor) {
  Rescaler rescaler(expression, unit);
  const int result = rescaler.times(factor, static_cast<int>(expression.nodes().size()) - 1);
  return rescaler.build.finish(result);
}

} // namespace sagebwd
