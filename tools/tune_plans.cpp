//===- tune_plans.cpp - Speed and error of the precisions ------------------===//
#include "tools/tune_plans.h"

namespace sagebwd::tools {
namespace {

double total_ms(const PlanFigures& plan) { return plan.forward_ms + plan.backward_ms; }

} // namespace

Table table_of(const std::vector<PlanFigures>& plans) {
  Table table;
  for (const PlanFigures& plan : plans)
    table.add({{"precision", "precision", std::string(to_string(plan.precision))},
               {"gradient_kernels", "gradients", value_text(plan.gradient_kernels)},
               {"int8_products", "INT8 of 7", plan.int8_products},
               number("forward_ms", "forward ms", 4, plan.forward_ms),
               number("backward_ms", "backward ms", 4, plan.backward_ms),
               number("speedup", "speed", 3, total_ms(plans[0]) / total_ms(plan)),
               number("rel_l2_o", "error O", 4, plan.o.rel_l2),
               number("rel_l2_dq", "dQ", 4, plan.dq.rel_l2),
               number("rel_l2_dk", "dK", 4, plan.dk.rel_l2),
               number("rel_l2_dv", "dV", 4, plan.dv.rel_l2)});
  return table;
}

std::string legend_of(const std::vector<PlanFigures>& plans, const Problem& timed) {
  const Problem errors = problem_of_errors(timed);
  return "speed of forward and backward against " + name_of(plans[0]) +
         "; errors are relative L2 against FP64, standard normal inputs, one head of " +
         std::to_string(errors.seq_q) + " queries and " + std::to_string(errors.seq_kv) + " keys";
}

} // namespace sagebwd::tools
