//===- random_intervals.h - Intervals of hidden queries, drawn --------------===//
#pragma once

#include "runtime/reference/reference.h"

namespace sagebwd::tools {

/// Draws Inputs::intervals for a spec with intervals, and what shares them. A seed gives the same
/// numbers on every machine. Neighbours of 1 to 300 keys have the same ones, so that some blocks of
/// scores are hidden from everybody; some keys hide no query and some all; in one draw of four some
/// queries see no key.
void add_random_intervals(const AttentionSpec&, uint64_t seed, reference::Inputs&);

} // namespace sagebwd::tools
