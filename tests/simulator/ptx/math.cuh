#pragma once

namespace simulator {
/// Results that are NaN have these bits on a GPU, and kernels compare bits.
inline float canonical(float x) { return x != x ? __int_as_float(0x7fffffff) : x; }
/// .ftz: a subnormal number is a zero of its sign.
inline float flushed(float x) {
  return canonical(__builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x);
}
} // namespace simulator

// Approximations are correctly rounded here: they differ from a GPU's by its last bits.
inline float exp2_approx(float x) { return simulator::flushed(__builtin_exp2f(x)); }
inline float log2_approx(float x) {
  return simulator::canonical(__builtin_log2f(simulator::flushed(x)));
}
inline float reciprocal_approx(float x) { return simulator::flushed(1 / simulator::flushed(x)); }
inline float tanh_approx(float x) { return simulator::canonical(__builtin_tanhf(x)); }
inline float max_nan(float a, float b) { return simulator::canonical(a != a || a > b ? a : b); }
inline float max_number(float a, float b) { return simulator::canonical(b != b || a > b ? a : b); }
inline float max_magnitude(float a, float b) { return max_nan(a, __builtin_fabsf(b)); }
