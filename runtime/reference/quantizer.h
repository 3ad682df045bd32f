//===- quantizer.h - The quantiser psi and the Hadamard rotation ----------===//
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::reference {

inline constexpr float kSignedLevels = 127;
inline constexpr float kUnsignedLevels = 255;

/// A scale: the value of one level, and its inverse.
struct Scale {
  float value;
  float inverse;
};
/// If a group's largest magnitude is below this, its levels are zeros. The reciprocals of all
/// larger scales are finite.
inline constexpr float kSmallest = 0x1p-119f;
/// The scale of psi for a group whose largest magnitude is `maximum`: 0 if it is below `smallest`,
/// NaN if it is not finite.
Scale scale_of(float maximum, float levels, float smallest = kSmallest);

/// Which elements have one scale.
enum class Sharing { row, column, whole };

/// A quantised matrix: element (i, j) has the value levels(i, j) * row_scale[i] * column_scale[j].
/// If the scale does not depend on the row, row_scale is 1; if it does not depend on the column,
/// column_scale is 1.
struct Quantized {
  std::vector<float> levels; ///< rows x columns, integer values
  std::vector<float> row_scale, column_scale;
};
/// Quantises a matrix. `levels` is kSignedLevels, or kUnsignedLevels if no value is negative.
Quantized quantize(const float* x, int64_t rows, int64_t columns, int64_t stride, Sharing,
                   float levels, float smallest = kSmallest);

/// Adds product(i, j) * row[i] * column[j] to sum(i, j).
void add_scaled(float* sum, const float* product, int64_t rows, int64_t columns, const float* row,
                const float* column);

/// Whether channel c changes its sign before the transform: the parity of c0 c1 + c2 c5 + c3 c4 +
/// c6 c7, where ci is bit i of c. With these signs, no row of the Hadamard matrix equals a vector
/// whose channels have one magnitude, such as an offset of all channels. The transform would gather
/// such a vector in one channel.
bool is_negated(int channel);

/// Applies the normalised Hadamard transform, with signs, to a token's channels: in FP32, in
/// Sylvester order, in blocks of the largest power of two that divides `channels`.
void rotate(float* token, int channels);

} // namespace sagebwd::reference
