//===- selection.h - Choose the winner among timed tiles ------------------===//
//
// These functions are pure, so that a tuning's decision can be computed again from its record.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace sagebwd {

/// The median; 0 if there are no values.
double median_of(std::vector<double> values);
/// The median absolute deviation (MAD) from the median.
double mad_of(const std::vector<double>& values);

struct Timing {
  double median_ms = 0, mad_ms = 0;
};

/// The difference in milliseconds above which two timings count as different: the larger of 2 % of
/// the slower median and three times the larger MAD.
double margin_ms(const Timing&, const Timing&);

/// The index of the winner. Index 0 is the default, which must have a timing; a tile without a
/// timing has dropped out. A challenger must beat the default by more than their margin. Among the
/// challengers within the margin of the fastest, the first wins, so that two tunings agree.
size_t winner_of(const std::vector<std::optional<Timing>>&);

} // namespace sagebwd
