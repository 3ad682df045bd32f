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

/// Whether f is a term in s alone (s + g for sums, else s * g), where that is easy to see.
bool is_term_of_s(const Expression& expression, bool sums) {
  const std::vector<Dependence> depends = dependences(expression);
  std::vector<bool> terms;
  for (const Node& n : expression.nodes()) {
    // Inputs come before, so that their answers are known.
    const auto free = [&](size_t i) { return !depends[static_cast<size_t>(n.inputs[i])].s; };
    const auto term = [&](size_t i) { return bool(terms[static_cast<size_t>(n.inputs[i])]); };
    const bool left = n.inputs[1] != Expression::kNone && term(0) && free(1);
    const bool right = n.inputs[1] != Expression::kNone && free(0) && term(1);
    bool is_term = false;
    if (n.op == Op::name)
      is_term = n.value == static_cast<int32_t>(PointName::s);
    else if (n.op == Op::where)
      is_term = free(0) && term(1) && term(2);
    else if (n.op == (sums ? Op::add : Op::multiply))
      is_term = left || right;
    else if (n.op == (sums ? Op::subtract : Op::divide))
      is_term = left;
    else if (n.op == Op::negate)
      is_term = !sums && term(0);
    else if (n.op == Op::least || n.op == Op::greatest)
      is_term = sums && term(0) && term(1);
    terms.push_back(is_term);
  }
  return terms.back();
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

Dependence dependence_of_indices(const Expression& expression, size_t operand) {
  const std::vector<Dependence> all = dependences(expression);
  Dependence joined;
  for (size_t i = 0; i < all.size(); ++i)
    if (const Node& n = expression.nodes()[i];
        n.op == Op::read && static_cast<size_t>(n.value) == operand)
      join(joined, all[i]);
  return joined;
}

bool is_shift(const Expression& expression) { return is_term_of_s(expression, true); }
bool is_scale(const Expression& expression) { return is_term_of_s(expression, false); }

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
