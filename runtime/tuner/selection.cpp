//===- selection.cpp - Choose the winner among timed tiles ----------------===//

#include "runtime/tuner/selection.h"

#include <algorithm>
#include <cmath>

namespace sagebwd {
namespace {

constexpr double kRelativeMargin = 0.02;
constexpr double kMadMargin = 3;

bool beats(const Timing& challenger, const Timing& other) {
  return challenger.median_ms < other.median_ms - margin_ms(challenger, other);
}

} // namespace

double median_of(std::vector<double> values) {
  if (values.empty())
    return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double mad_of(const std::vector<double>& values) {
  const double middle = median_of(values);
  std::vector<double> deviations;
  for (double value : values)
    deviations.push_back(std::abs(value - middle));
  return median_of(std::move(deviations));
}

double margin_ms(const Timing& a, const Timing& b) {
  return std::max(kRelativeMargin * std::max(a.median_ms, b.median_ms),
                  kMadMargin * std::max(a.mad_ms, b.mad_ms));
}

size_t winner_of(const std::vector<std::optional<Timing>>& timings) {
  const Timing& by_default = timings.at(0).value();
  const auto contends = [&](const std::optional<Timing>& t) { return t && beats(*t, by_default); };
  const Timing* fastest = nullptr;
  for (size_t i = 1; i < timings.size(); ++i)
    if (contends(timings[i]) && (!fastest || timings[i]->median_ms < fastest->median_ms))
      fastest = &*timings[i];
  if (!fastest)
    return 0;
  size_t winner = 1;
  while (!contends(timings[winner]) || beats(*fastest, *timings[winner]))
    ++winner;
  return winner;
}

} // namespace sagebwd
