//===- expression.cpp - Values of expressions, and what they depend on ------===//

#include "generator/expression.h"

#include "generator/expression_build.h"

namespace sagebwd {
namespace {

using Op = Expression::Op;
using Node = Expression::Node;

void join(Dependence& one, const Dependence& other) {
  one.b |= other.b, one.h |= other.h, one.q |= other.q, one.k |= other.k, one.s |= other.s;
}

} // namespace

std::vector<Dependence> dependences(const Expression& expression) {
  std::vector<Dependence> all;
  for (const Node& n : expression.nodes()) {
    Dependence own;
    if (n.op == Op::name) {
      bool* const names[] = {&own.b, &own.h, &own.q, &own.k, &own.s};
      *names[n.value] = true;
    }
    for (int input : n.inputs)
      if (input != Expression::kNone)
        join(own, all[static_cast<size_t>(input)]);
    all.push_back(own);
  }
  return all;
}

Dependence dependence(const Expression& expression) { return dependences(expression).back(); }

bool is_shift(const Expression& expression) {
  const std::vector<Dependence> depends = dependences(expression);
  std::vector<bool> shifts;
  for (const Node& n : expression.nodes()) {
    // Inputs come before, so that their answers are known.
    const auto free = [&](size_t i) { return !depends[static_cast<size_t>(n.inputs[i])].s; };
    const auto shift = [&](size_t i) { return bool(shifts[static_cast<size_t>(n.inputs[i])]); };
    bool is_one = false;
    if (n.op == Op::name)
      is_one = n.value == static_cast<int32_t>(PointName::s);
    else if (n.op == Op::where)
      is_one = free(0) && shift(1) && shift(2);
    else if (n.op == Op::add)
      is_one = (shift(0) && free(1)) || (free(0) && shift(1));
    else if (n.op == Op::subtract)
      is_one = shift(0) && free(1);
    else if (n.op == Op::least || n.op == Op::greatest)
      is_one = shift(0) && shift(1);
    shifts.push_back(is_one);
  }
  return shifts.back();
}

double evaluate(const Expression& expression, const Point& at, const ReadOperand& read,
                bool in_fp32) {
  const double names[] = {static_cast<double>(at.b), static_cast<double>(at.h),
                          static_cast<double>(at.q), static_cast<double>(at.k), at.s};
  std::vector<double> values; // an int32 is exact in FP64
  values.reserve(expression.nodes().size());
  for (const Node& n : expression.nodes()) {
    const auto input = [&](size_t i) {
      return n.inputs[i] == Expression::kNone ? 0 : values[static_cast<size_t>(n.inputs[i])];
    };
    if (n.op == Op::literal)
      values.push_back(value_of(n));
    else if (n.op == Op::name)
      values.push_back(names[n.value]);
    else if (n.op == Op::read)
      values.push_back(read(static_cast<size_t>(n.value), static_cast<int32_t>(input(0)),
                            static_cast<int32_t>(input(1))));
    else
      values.push_back(computed(n.op, n.type, input(0), input(1), input(2)));
    if (in_fp32 && n.type == ValueType::real)
      values.back() = static_cast<float>(values.back());
  }
  return values.back();
}

} // namespace sagebwd
