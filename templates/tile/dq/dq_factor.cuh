//===- tile/dq/dq_factor.cuh - By what a query's dQ is multiplied for FP16 -----===//
//
// Sums of dQ in FP16 (tile/dq/dq_sums16.cuh) are those of a query times a power of two, the same
// for all blocks that add to them. No finite input may overflow them. For a query i
//   sum over keys of P |dP - delta| |K|  <=  (|dO_i| max |V_j| + |delta_i|) max |K_jc| = B
// as P sums to 1. A value that is added and rounded moves a sum by no more than twice its own size,
// for the sum as it was is a number of the format too. So with a factor f below 2^15 / B no sum
// comes to 2^16, however many blocks add; the largest number is 65504. SLACK is for what B leaves
// out: P's sum from scores in 8 bits, roundings of dS, K and B itself.
//
// Lengths |x| are stored divided by 16. B is kept as an exponent, because B itself may exceed
// FP32's range. If an input is NaN or Inf, the factor is NaN, so that dQ shows it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/math.cuh"

/// This is what bounds a head's keys, or a chunk of them: key_range[head][chunk] holds the largest
/// values of K's channels, those of -K's, and the greatest length of V's rows.
constexpr int LOWEST_KEYS = HEAD_DIM, LONGEST_VALUE = 2 * HEAD_DIM;
constexpr int KEY_RANGE_FLOATS = LONGEST_VALUE + 1;

constexpr float LENGTH_UNIT = 16;
/// A vector's length over LENGTH_UNIT, from the sum of its squares, or where that is beyond FP32 or
/// lost what it should hold, a bound from its largest magnitude.
__device__ __forceinline__ float length_of(float squares, float largest) {
  constexpr float ROOT = HEAD_DIM == 64 ? 8 : HEAD_DIM == 128 ? 12 : HEAD_DIM == 256 ? 16 : 23;
  static_assert(ROOT * ROOT >= HEAD_DIM, "no bound for the length of a vector of this width");
  const bool sound = squares > 1e-30f && squares < 1e38f;
  return sound ? exp2_approx(0.5f * log2_approx(squares)) * (1 / LENGTH_UNIT)
               : largest * (ROOT / LENGTH_UNIT);
}

struct KeyRange {
  float longest_value; ///< over LENGTH_UNIT
  float largest_key;   ///< magnitude of any channel of K as dQ's product has it
};

/// A positive number lies below 2^exponent_above(x), and at most a factor of 2.
__device__ __forceinline__ int exponent_above(float x) {
  return static_cast<int>(__float_as_uint(x) >> 23) - 126;
}

/// The factor of a query, from the length of its dO over LENGTH_UNIT and its delta.
__device__ __forceinline__ float dq_factor(const KeyRange& keys, float dout_length, float delta) {
  constexpr float SLACK = 1.125f;
  constexpr float SQUARE = LENGTH_UNIT * LENGTH_UNIT;
  const u32 key_bits = __float_as_uint(keys.largest_key);
  const float mantissa = __uint_as_float((key_bits & 0x7fffff) | 0x3f800000);
  const float per_key =
      __fmaf_rn(dout_length, keys.longest_value, max_magnitude(0, delta) * (1 / SQUARE));
  const float bound = per_key * (SLACK * mantissa);
  if (!(bound < INFINITY_F && keys.largest_key < INFINITY_F))
    return __int_as_float(0x7fff0000); // NaN in bf16 too
  // largest_key = mantissa * 2^(exponent_above - 1); 8 for SQUARE.
  const int above = exponent_above(bound) + exponent_above(keys.largest_key) - 1 + 8;
  return __uint_as_float((127 + maximum(-126, minimum(126, 15 - above))) << 23);
}
