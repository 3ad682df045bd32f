//===- formats.h - 16-bit floats, by their bits ------------------------------===//
#pragma once

namespace simulator {

inline float float_of_bf16(unsigned bits) { return __builtin_bit_cast(float, bits << 16); }

inline float float_of_fp16(unsigned bits) {
  // Shifted into FP32's places the exponent is too small by 112; the product is exact, and makes
  // subnormal numbers normal.
  const unsigned size = (bits & 0x7fff) << 13;
  const unsigned finite = __builtin_bit_cast(unsigned, __builtin_bit_cast(float, size) * 0x1p112f);
  const unsigned all = size < 0x7c00u << 13 ? finite : size | 0x7f800000;
  return __builtin_bit_cast(float, all | (bits & 0x8000) << 16);
}

/// Rounded to nearest even; NaN as the GPU writes it.
inline unsigned bf16_of_float(float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned fp16_of_float(float x) {
  const float size = __builtin_fabsf(x);
  const unsigned sign = __builtin_bit_cast(unsigned, x) >> 16 & 0x8000;
  if (x != x)
    return 0x7fff;
  if (size >= 65520)
    return sign | 0x7c00;
  if (size < 0x1p-14f) // a sum with 2^-1 rounds to multiples of 2^-24, the lowest bits
    return sign | (__builtin_bit_cast(unsigned, size + 0.5f) & 0x7ff);
  const unsigned bits = __builtin_bit_cast(unsigned, size);
  return sign | ((bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}
/// This does not round to FP32 first: if x lies between two numbers of FP32, the one whose last bit
/// is set is on x's side of every number of FP16, and of every half. There are no branches, which
/// nobody could predict.
inline unsigned fp16_of_double(double x) {
  const float near = static_cast<float>(x);
  const double error = x - static_cast<double>(near);
  const unsigned between = (error != 0) & (error == error) & (__builtin_fabsf(near) < 65520);
  const unsigned bits = __builtin_bit_cast(unsigned, near);
  const unsigned beyond = ((error < 0) != (near < 0)) & (bits << 1 != 0); // in magnitude
  return fp16_of_float(__builtin_bit_cast(float, (bits - (between & beyond)) | between));
}

} // namespace simulator
