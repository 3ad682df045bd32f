//===- dout_exponents.h - The powers of two that rows of dO are divided by --===//
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace sagebwd::test {

/// Gives the exponents of rows of dO in units of so many, where the head has `valid` of them. A
/// row's logarithm is that of its largest magnitude, linear between powers of two, in units of
/// 2^-13, rounded down.
inline std::vector<int> exponents_of(const std::vector<float>& dout, int64_t tokens,
                                     int64_t channels, int64_t unit, int64_t valid) {
  std::vector<int> exponents(tokens, 0);
  const auto logarithm = [&](int64_t i) -> int64_t {
    double largest = 0;
    for (int64_t c = 0; c < channels; ++c) {
      const double size = std::fabs(dout[i * channels + c]);
      if (!std::isfinite(size))
        return 0;
      largest = std::max(largest, size);
    }
    if (largest < 0x1p-119)
      return 0;
    int power;
    const double fraction = 2 * std::frexp(largest, &power); // largest = fraction 2^(power - 1)
    return static_cast<int64_t>(std::floor((power - 1 + 127 + fraction - 1) * 8192));
  };
  for (int64_t first = 0; first < tokens; first += unit) {
    const int64_t end = std::min(first + unit, tokens);
    int64_t sum = 0, count = 0;
    for (int64_t i = first; i < end; ++i) {
      sum += logarithm(i);
      count += logarithm(i) != 0;
    }
    if (count == 0) { // as the largest of some of the head's rows
      count = 1, sum = 127 * 8192;
      for (int64_t i = 0, most = 0; i < valid; i += (valid + 255) / 256)
        if (logarithm(i) > most)
          sum = most = logarithm(i);
    }
    const int64_t mean = sum / count;
    for (int64_t i = first; i < end; ++i) {
      const int64_t own = logarithm(i);
      const double off = own ? static_cast<double>(own - mean) : 0; // a row of zeros: as the mean
      exponents[i] = std::clamp(
          static_cast<int>(std::floor((off + 4096) / 8192) + mean / 8192 - 127), -100, 100);
    }
  }
  return exponents;
}

} // namespace sagebwd::test
