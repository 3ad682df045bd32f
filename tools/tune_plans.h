//===- tune_plans.h - Speed and error of the precisions --------------------===//
#pragma once

#include "runtime/plans.h"
#include "tools/console.h"

#include <vector>

namespace sagebwd::tools {

/// One row per precision; speeds are relative to the first.
Table table_of(const std::vector<PlanFigures>&);
/// The text below the table.
std::string legend_of(const std::vector<PlanFigures>&, const Problem& timed);

} // namespace sagebwd::tools
