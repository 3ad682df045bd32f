//===- tune_plans.h - Speed and error of the precisions --------------------===//
#pragma once

#include "runtime/plans.h"
#include "tools/console.h"
#include "tools/picture.h"

#include <vector>

namespace sagebwd::tools {

/// One row per precision; speeds are relative to the first.
Table table_of(const std::vector<PlanFigures>&);
/// Charts of their times and of their largest errors.
std::vector<BarChart> charts_of(const std::vector<PlanFigures>&);
/// The text below the table.
std::string legend_of(const std::vector<PlanFigures>&, const Problem& timed);

} // namespace sagebwd::tools
