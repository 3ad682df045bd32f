//===- tune_plans.h - tune --plans: speed beside error ---------------------===//
#pragma once

#include "runtime/plans.h"
#include "tools/console.h"
#include "tools/picture.h"

#include <vector>

namespace sagebwd::tools {

/// A row a precision; the first is what the others' speed is measured against.
Table table_of(const std::vector<PlanFigures>&);
/// Their times, and their largest errors.
std::vector<BarChart> charts_of(const std::vector<PlanFigures>&);
/// What stands below it.
std::string legend_of(const std::vector<PlanFigures>&, const Problem& timed);

} // namespace sagebwd::tools
