//===- quantizer.h - psi and the Hadamard rotation, as the kernels do them -===//
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::reference {

inline constexpr float kSignedLevels = 127;
inline constexpr float kUnsignedLevels = 255;

/// The value of one level and its inverse.
struct Scale {
  float value;
  float inverse;
};
/// A group whose largest magnitude is below this quantises to zeros: the reciprocal of anything
/// larger is finite.
inline constexpr float kSmallest = 0x1p-119f;
/// psi's scale of a group whose largest magnitude is `maximum`: 0 below `smallest`, NaN where the
/// maximum is not finite.
Scale scale_of(float maximum, float levels, float smallest = kSmallest);

/// What shares one scale.
enum class Sharing { row, column, whole };

/// A quantised matrix: element (i, j) stands for levels(i, j) * row_scale[i] * column_scale[j]. The
/// scales along which the scale does not vary are 1.
struct Quantized {
  std::vector<float> levels; ///< rows x columns, integers
  std::vector<float> row_scale, column_scale;
};
/// `levels`: kSignedLevels, or kUnsignedLevels for values that are never negative.
Quantized quantize(const float* x, int64_t rows, int64_t columns, int64_t stride, Sharing,
                   float levels, float smallest = kSmallest);

/// Adds product(i, j) * row[i] * column[j] to sum(i, j).
void add_scaled(float* sum, const float* product, int64_t rows, int64_t columns, const float* row,
                const float* column);

/// Whether channel c's sign changes ahead of the transform: the parity of c0 c1 + c2 c5 + c3 c4 +
/// c6 c7 by its bits. With these no row of the Hadamard matrix is a vector of one magnitude, such
/// as an offset of all channels, which it would gather in one of them.
bool is_negated(int channel);

/// Normalised Hadamard transform of a token's channels, with signs, in FP32, in Sylvester order, in
/// blocks of the largest power of two that divides `channels`.
void rotate(float* token, int channels);

} // namespace sagebwd::reference
