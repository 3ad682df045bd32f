//===- distance.h - How far a result is from what it should be -------------===//
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace sagebwd::tools {

/// L2 norms of x - y and of y, and the largest |x - y|. A NaN stays in all of them.
struct Distance {
  double error = 0, norm = 0, largest_error = 0;
  double relative() const { return norm > 0 ? error / norm : error; }
};
template <typename T> Distance distance(const std::vector<float>& x, const std::vector<T>& y) {
  Distance d;
  if (constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(); x.size() != y.size())
    return {kNaN, 0, kNaN};
  for (size_t i = 0; i < x.size(); ++i) {
    if (y[i] == -INFINITY && x[i] == -INFINITY) // lse of a query that sees no key
      continue;
    const double error = static_cast<double>(x[i]) - y[i];
    d.error += error * error;
    d.norm += static_cast<double>(y[i]) * y[i];
    // Nothing compares greater than a NaN.
    if (std::isnan(error) || std::abs(error) > d.largest_error)
      d.largest_error = std::abs(error);
  }
  d.error = std::sqrt(d.error);
  d.norm = std::sqrt(d.norm);
  return d;
}

template <typename T> double norm(const std::vector<T>& values) {
  double sum = 0;
  for (double value : values)
    sum += value * value;
  return std::sqrt(sum);
}

/// The largest norm of a token's vector.
inline double longest_token(const std::vector<float>& values, int channels) {
  double longest = 0;
  for (size_t first = 0; first < values.size(); first += channels) {
    double sum = 0;
    for (int c = 0; c < channels; ++c)
      sum += static_cast<double>(values[first + c]) * values[first + c];
    longest = std::max(longest, sum);
  }
  return std::sqrt(longest);
}

} // namespace sagebwd::tools
