//===- plans.h - Precision plans side by side on the GPU at hand ----------===//
#pragma once

#include "generator/plan.h"
#include "runtime/reference/reference.h"

#include <functional>
#include <string>
#include <vector>

namespace sagebwd {

/// One precision: how fast it is on a problem, and how far from FP64 on a smaller one.
struct PlanFigures {
  Precision precision;
  int int8_products;              ///< of the seven
  double forward_ms, backward_ms; ///< medians, all passes included
  reference::ErrorFigures o, dq, dk, dv;
};

struct PlanRequest {
  AttentionSpec spec; ///< its precision does not matter
  Problem problem;
  int device = 0;
  int rounds = 15;
  uint64_t seed = 0;
  /// Called before each step with what is done now and how many steps are done, of how many.
  std::function<void(const std::string& what, int done, int total)> progress;
};
/// What the errors are taken of: one head with at most so many queries and keys, since the FP64
/// reference runs on the CPU.
inline constexpr int64_t kErrorTokens = 2048;
Problem problem_of_errors(const Problem&);

/// Runs every precision on standard normal inputs, timed in turns so that none has the GPU to
/// itself. Raises SpecError, LibraryError, CompileError or DriverError.
std::vector<PlanFigures> compare_plans(const PlanRequest&);

} // namespace sagebwd
