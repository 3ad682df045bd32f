//===- half_sums.cpp - dP with sums in FP16 -------------------------------===//
#include "runtime/reference/half_sums.h"
#include "generator/plan.h"
#include "runtime/reference/gemm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace sagebwd::reference {
namespace {

constexpr int64_t kInstructionDepth = 16; ///< products of one instruction
/// Magnitudes of dO and of V lie below 2^-4 and 2^9: with 256 channels sums lie below 2^13.
constexpr int kDoutExponent = -4, kValueExponent = 9;
constexpr float kBeyond = std::numeric_limits<float>::infinity();
constexpr float kNoNumber = std::numeric_limits<float>::quiet_NaN();

/// The larger number; NaN if either is NaN.
float max_nan(float a, float b) { return std::isnan(a) || a > b ? a : b; }

/// The mean over tokens in the order of the kernels: threads of key_mean sum every so many tokens
/// of a chunk, and quantize adds the sums of chunks up.
std::vector<float> mean_of(const float* x, int64_t tokens, int64_t channels, int width) {
  constexpr int kThreads = 256;
  const int64_t rows = kThreads / (width / 8), parts = kThreads / width;
  const int64_t share = ceil_div(ceil_div(tokens, kMostMeanChunks), 64) * 64;
  const int64_t chunk = std::max(kMeanChunk, share);
  std::vector<float> mean(channels);
  for (int64_t c = 0; c < channels; ++c) {
    std::vector<float> of_part(parts, 0.0f);
    for (int64_t first = 0; first < tokens; first += chunk) {
      float of_chunk = 0;
      for (int64_t row = 0; row < rows; ++row) {
        float sum = 0;
        for (int64_t i = first + row; i < std::min(first + chunk, tokens); i += rows)
          sum += x[i * channels + c];
        of_chunk += sum;
      }
      of_part[first / chunk % parts] += of_chunk;
    }
    float sum = 0;
    for (float part : of_part)
      sum += part;
    mean[c] = sum / static_cast<float>(tokens);
  }
  return mean;
}

} // namespace

double round_to_half(double x) {
  if (std::isnan(x))
    return x;
  int exponent;
  std::frexp(x, &exponent); // |x| is at least 2^(exponent - 1), and 11 bits of it are kept
  const double step = std::ldexp(1.0, std::max(exponent - 11, -24));
  const double rounded = std::nearbyint(x / step) * step;
  return std::fabs(rounded) < 65520 ? rounded : std::copysign(kBeyond, x);
}

void half_products(int64_t m, int64_t n, int64_t k, const double* a, const double* b, double* c) {
  std::vector<double> sums(m * n);
  std::fill_n(c, m * n, 0.0);
  for (int64_t first = 0; first < k; first += kInstructionDepth) {
    gemm(m, n, std::min(kInstructionDepth, k - first), MatrixView<double>{a + first, k},
         MatrixView<double>{b + first, k}.transposed(), sums.data(), n);
    for (int64_t i = 0; i < m * n; ++i)
      c[i] = round_to_half(c[i] + sums[i]);
  }
}

Power power_below(int exponent, float magnitude) {
  if (!std::isfinite(magnitude))
    return {kNoNumber, kNoNumber};
  const int above = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23) - 126;
  const int power = std::clamp(exponent - above, -126, 126);
  return {std::ldexp(1.0f, power), std::ldexp(1.0f, -power)};
}

CentredValues::CentredValues(const float* v, int64_t keys, int64_t channels, int width)
    : centre(mean_of(v, keys, channels, width)), keys_(keys), channels_(channels),
      values_(keys * channels) {
  float largest = 0;
  for (int64_t c = 0; c < channels; ++c) {
    if (!std::isfinite(centre[c]))
      centre[c] = 0;
    float highest = -kBeyond, lowest = -kBeyond; // the largest value of V, and of -V
    for (int64_t j = 0; j < keys; ++j) {
      highest = max_nan(highest, v[j * channels + c]);
      lowest = max_nan(lowest, -v[j * channels + c]);
    }
    largest = max_nan(max_nan(largest, highest - centre[c]), lowest + centre[c]);
  }
  const Power power = power_below(kValueExponent, largest);
  inverse_ = power.inverse;
  for (int64_t i = 0; i < keys * channels; ++i)
    values_[i] = round_to_half((v[i] - centre[i % channels]) * power.value);
}

void CentredValues::multiply(const float* dout, int64_t rows, const int* exponents,
                             float* dp) const {
  std::vector<double> a(rows * channels_), sums(rows * keys_);
  std::vector<float> factor(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = dout + i * channels_;
    float largest = 0;
    for (int64_t c = 0; c < channels_; ++c)
      largest = max_nan(largest, std::fabs(row[c]));
    const Power power = power_below(kDoutExponent, largest);
    factor[i] = power.inverse * std::ldexp(1.0f, -exponents[i]) * inverse_;
    for (int64_t c = 0; c < channels_; ++c)
      a[i * channels_ + c] = round_to_half(row[c] * power.value);
  }
  half_products(rows, keys_, channels_, a.data(), values_.data(), sums.data());
  for (int64_t i = 0; i < rows * keys_; ++i)
    dp[i] = static_cast<float>(sums[i]) * factor[i / keys_];
}

} // namespace sagebwd::reference
