//===- reference.cpp - Attention on the CPU, exact and emulated -----------===//
#include "runtime/reference/reference.h"
#include "runtime/reference/head.h"

namespace sagebwd::reference {

Outputs<double> exact(const Inputs& in, const Mask& mask, bool keep_matrices) {
  check(in);
  return run_heads<double>(in, keep_matrices, kExactPanel,
                           [&](int64_t head) { return exact_head(head_of(in, mask, head)); });
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
