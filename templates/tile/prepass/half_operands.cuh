//===- tile/prepass/half_operands.cuh - Powers of two for operands of FP16 sums -------===//
//
// tile/math/dp_sums16.cuh says what is multiplied by them.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"
#include "tile/math/dp_sums.cuh"

/// This is what bounds a head's values, or a chunk of them: value_range[head][chunk] holds sums of
/// V's channels, their largest values, and those of -V's.
constexpr int HIGHEST_VALUES = HEAD_DIM, LOWEST_VALUES = 2 * HEAD_DIM;
constexpr int VALUE_RANGE_FLOATS = 3 * HEAD_DIM;

constexpr int VALUE_EXPONENT = 9, DOUT_EXPONENT = -4; ///< operands lie below these powers of two
static_assert(!DP16 || HEAD_DIM <= 256, "sums lie below 2^13");

struct Power {
  float value, inverse;
};
/// The power of two that brings a magnitude below 2^exponent, by at most a factor of 2. Both are
/// NaN for one that is not finite.
__device__ __forceinline__ Power power_below(int exponent, float magnitude) {
  if (!(magnitude < INFINITY_F))
    return {__int_as_float(0x7fffffff), __int_as_float(0x7fffffff)};
  const int above = static_cast<int>(__float_as_uint(magnitude) >> 23) - 126;
  const int power = maximum(-126, minimum(126, exponent - above));
  return {__int_as_float((127 + power) << 23), __int_as_float((127 - power) << 23)};
}
