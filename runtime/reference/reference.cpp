//===- reference.cpp - Attention on the CPU, exact and emulated -----------===//
#include "runtime/reference/reference.h"
#include "runtime/reference/head.h"
#include "runtime/reference/random.h"

#include <cmath>
#include <numbers>

namespace sagebwd::reference {

Outputs<double> exact(const Inputs& in, const Mask& mask, bool keep_matrices) {
  check(in);
  check_lists(in, mask);
  return run_heads<double>(in, keep_matrices, kExactPanel,
                           [&](int64_t head) { return exact_head(head_of(in, mask, head)); });
}

std::vector<uint8_t> random_lists(const AttentionSpec& spec, const Problem& p, double density,
                                  uint64_t seed) {
  constexpr uint32_t kStream = 100; // no tensor has it
  const int64_t count = p.batch * p.heads * list_blocks(Tokens::queries, spec, p) *
                        list_blocks(Tokens::keys, spec, p);
  const std::vector<float> drawn = normal(count, 1, seed, kStream);
  std::vector<uint8_t> listed(count);
  for (int64_t i = 0; i < count; ++i) // the drawn number's quantile
    listed[i] = 0.5 * std::erfc(-drawn[i] / std::numbers::sqrt2) < density;
  return listed;
}

ProductPlan plan_of(Precision precision) {
  const Int8Products int8 = which_int8(precision);
  return {.s = int8.s, .pv = int8.pv, .dv = int8.dv, .dp = false, .dq = int8.dq, .dk = int8.dk};
}

std::vector<std::string> names_of(const ProductPlan& plan) {
  std::vector<std::string> names;
  for (const auto& [name, product] : kProducts)
    if (plan.*product)
      names.emplace_back(name);
  return names;
}

Outputs<float> emulate(const Inputs& in, const AttentionSpec& spec, const ProductPlan& plan,
                       bool keep_matrices, bool round_outputs, const std::vector<float>* given_o,
                       const std::vector<float>* given_lse) {
  check(in, spec);
  const size_t rows = in.problem.batch * in.problem.heads * in.problem.seq_q;
  if ((given_o && given_o->size() != rows * in.head_dim) ||
      (given_lse && given_lse->size() != rows))
    throw SpecError("given_o and given_lse must have the sizes of the forward's outputs, " +
                    std::to_string(rows * in.head_dim) + " and " + std::to_string(rows));
  auto out = run_heads<float>(in, keep_matrices, spec.group_q, [&](int64_t index) {
    Head head = head_of(in, spec, index);
    if (given_o)
      head.given_o = given_o->data() + index * head.queries * head.channels;
    if (given_lse)
      head.given_lse = given_lse->data() + index * head.queries;
    return emulated_head(head, spec, plan, round_outputs);
  });
  if (round_outputs)
    for (auto* gradient : {&out.dk, &out.dv})
      for (float& x : *gradient)
        x = round_to(spec.dtype, x);
  return out;
}

} // namespace sagebwd::reference
