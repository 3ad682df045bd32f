//===- selection.h - Which of the timed tiles wins --------------------------===//
//
// Pure functions, so that what a tuning decides can be worked out again from its record.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace sagebwd {

/// Of no values, 0.
double median_of(std::vector<double> values);
/// Median absolute deviation from the median.
double mad_of(const std::vector<double>& values);

struct Timing {
  double median_ms = 0, mad_ms = 0;
};

/// What two timings must differ by to be told apart: the larger of 2 % of the slower and three MADs
/// of the noisier.
double margin_ms(const Timing&, const Timing&);

/// The index of the winner. The first is the default, which must be timed; nothing: dropped out.
/// A challenger must beat the default by more than their margin. Of those not told apart from the
/// fastest challenger, the earliest wins, so that two tunings agree.
size_t winner_of(const std::vector<std::optional<Timing>>&);

} // namespace sagebwd
