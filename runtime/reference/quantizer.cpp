//===- quantizer.cpp - The quantiser psi and the Hadamard rotation --------===//
#include "runtime/reference/quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace sagebwd::reference {
namespace {

/// The bits of |x|. Magnitudes compare as integers, and a NaN is the largest, so a maximum never
/// hides a NaN.
int32_t magnitude_bits(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }

/// Rounds half to even, for |x| < 2^22, in a form that compilers vectorise.
float round_half_even(float x) {
  constexpr float shifter = 0x1.8p23f;
  return (x + shifter) - shifter;
}

float level_of(float x, float inverse, float lowest, float highest) {
  return round_half_even(std::min(std::max(x * inverse, lowest), highest));
}

} // namespace

Scale scale_of(float maximum, float levels, float smallest) {
  if (!std::isfinite(maximum))
    return {std::numeric_limits<float>::quiet_NaN(), 0};
  if (maximum < smallest)
    return {0, 0};
  return {maximum * (1.0f / levels), levels / maximum};
}

Quantized quantize(const float* x, int64_t rows, int64_t columns, int64_t stride, Sharing sharing,
                   float levels, float smallest) {
  const bool by_row = sharing == Sharing::row;
  std::vector<int32_t> largest(by_row ? rows : columns, 0);
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = x + i * stride;
    if (by_row) {
      for (int64_t j = 0; j < columns; ++j)
        largest[i] = std::max(largest[i], magnitude_bits(from[j]));
    } else {
      for (int64_t j = 0; j < columns; ++j)
        largest[j] = std::max(largest[j], magnitude_bits(from[j]));
    }
  }
  if (sharing == Sharing::whole && columns > 0)
    std::fill(largest.begin(), largest.end(), *std::max_element(largest.begin(), largest.end()));

  Quantized result;
  result.levels.resize(rows * columns);
  result.row_scale.assign(rows, 1);
  result.column_scale.assign(columns, 1);
  std::vector<float> inverse(largest.size());
  for (size_t i = 0; i < largest.size(); ++i) {
    const Scale scale = scale_of(std::bit_cast<float>(largest[i]), levels, smallest);
    inverse[i] = scale.inverse;
    if (by_row)
      result.row_scale[i] = scale.value;
    else if (sharing == Sharing::column)
      result.column_scale[i] = scale.value;
    else
      std::fill(result.row_scale.begin(), result.row_scale.end(), scale.value);
  }
  const float lowest = levels == kUnsignedLevels ? 0 : -levels;
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = x + i * stride;
    float* to = result.levels.data() + i * columns;
    for (int64_t j = 0; j < columns; ++j) {
      const float n = inverse[by_row ? i : j];
      // The levels of a group without an inverse are zeros: x may be NaN or Inf, which have no
      // level.
      to[j] = n == 0 ? 0 : level_of(from[j], n, lowest, levels);
    }
  }
  return result;
}

void add_scaled(float* sum, const float* product, int64_t rows, int64_t columns, const float* row,
                const float* column) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      sum[i * columns + j] += product[i * columns + j] * row[i] * column[j];
}

bool is_negated(int channel) {
  const auto both = [&](int a, int b) { return channel >> a & channel >> b & 1; };
  return (both(0, 1) ^ both(2, 5) ^ both(3, 4) ^ both(6, 7)) != 0;
}

void rotate(float* token, int channels) {
  for (int i = 0; i < channels; ++i)
    token[i] = is_negated(i) ? -token[i] : token[i];
  const int size = channels & -channels;
  const float norm = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  for (int first = 0; first < channels; first += size) {
    float* x = token + first;
    for (int stride = 1; stride < size; stride *= 2)
      for (int block = 0; block < size; block += 2 * stride)
        for (int i = block; i < block + stride; ++i) {
          const float a = x[i], b = x[i + stride];
          x[i] = a + b;
          x[i + stride] = a - b;
        }
    for (int i = 0; i < size; ++i)
      x[i] *= norm;
  }
}

} // namespace sagebwd::reference
