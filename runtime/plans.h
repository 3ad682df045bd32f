//===- plans.h - Compare the precisions on this machine's GPU -------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/reference/reference.h"

#include <functional>
#include <string>
#include <vector>

namespace sagebwd {

/// The speed of one precision on a problem, and its errors against FP64 on a smaller problem.
struct PlanFigures {
  Precision precision;
  Backward gradient_kernels;      ///< split or fused
  int int8_products;              ///< of the seven matrix products
  double forward_ms, backward_ms; ///< medians; all kernels of the pass
  reference::ErrorFigures o, dq, dk, dv;
};

/// An architecture can compare these: every precision with the backward that a problem has by
/// default there and, if the spec leaves it open, with the other one. `left_out` gets a line for
/// each precision that cannot be built. Raises SpecError if none can.
std::vector<AttentionSpec> plans_on(const Arch&, const AttentionSpec&, const Problem&,
                                    std::vector<std::string>& left_out);
/// For example "six-of-seven, fused".
std::string name_of(const PlanFigures&);

struct PlanRequest {
  AttentionSpec spec; ///< its precision is ignored
  Problem problem;
  int device = 0;
  int rounds = 15;
  uint64_t seed = 0;
  /// Called before each step with its description, the number of finished steps and the total.
  std::function<void(const std::string& what, int done, int total)> progress;
};
/// The most queries and keys of the problem on which errors are measured. That problem has one
/// head, and is small because the FP64 reference runs on the CPU.
inline constexpr int64_t kErrorTokens = 2048;
Problem problem_of_errors(const Problem&);

/// Runs what plans_on() lists on standard normal inputs. All are timed in turns, so that all run
/// under the same conditions. `left_out` gets what plans_on() leaves out. Raises SpecError,
/// LibraryError, CompileError or DriverError.
std::vector<PlanFigures> compare_plans(const PlanRequest&, std::vector<std::string>& left_out);

} // namespace sagebwd
