//===- tile/math/ranges.cuh - What a mask's expression gives over a block of scores -----===//
//
// The operations of tile/math/expressions.cuh over ranges of ints. A range holds all values that
// an int has in the block, and perhaps others: an operand that occurs twice counts as two.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/expressions.cuh"
#include "tile/math/extremes.cuh"

/// Ints from `least` to `greatest`.
struct Ints {
  int least, greatest;

  __device__ __forceinline__ Ints(int value) : least(value), greatest(value) {}
  /// Ints wrap where they do not fit, and then may be anything.
  __device__ __forceinline__ Ints(s64 from, s64 to) : least(from), greatest(to) {
    if (from < LEAST_INT || to > GREATEST_INT)
      least = LEAST_INT, greatest = GREATEST_INT;
  }
  static __device__ __forceinline__ Ints any() { return {LEAST_INT, GREATEST_INT}; }
};

/// Whether a condition may be true, and false, somewhere in the block.
struct Truth {
  bool may_hold, may_fail;

  __device__ __forceinline__ Truth(bool value) : may_hold(value), may_fail(!value) {}
  __device__ __forceinline__ Truth(bool holds, bool fails) : may_hold(holds), may_fail(fails) {}
  __device__ __forceinline__ bool is_known() const { return may_hold != may_fail; }
};

__device__ __forceinline__ Truth operator!(Truth a) { return {a.may_fail, a.may_hold}; }
__device__ __forceinline__ Truth operator&(Truth a, Truth b) {
  return {a.may_hold && b.may_hold, a.may_fail || b.may_fail};
}
__device__ __forceinline__ Truth operator|(Truth a, Truth b) { return !(!a & !b); }
__device__ __forceinline__ Truth operator^(Truth a, Truth b) { return (a & !b) | (!a & b); }

__device__ __forceinline__ Truth operator<(Ints a, Ints b) {
  return {a.least < b.greatest, a.greatest >= b.least};
}
__device__ __forceinline__ Truth operator>(Ints a, Ints b) { return b < a; }
__device__ __forceinline__ Truth operator>=(Ints a, Ints b) { return !(a < b); }
__device__ __forceinline__ Truth operator<=(Ints a, Ints b) { return !(b < a); }
__device__ __forceinline__ Truth operator==(Ints a, Ints b) {
  return {a.least <= b.greatest && b.least <= a.greatest,
          a.least != b.greatest || a.greatest != b.least};
}
__device__ __forceinline__ Truth operator!=(Ints a, Ints b) { return !(a == b); }

__device__ __forceinline__ Ints min_of(Ints a, Ints b) {
  return {minimum(a.least, b.least), minimum(a.greatest, b.greatest)};
}
__device__ __forceinline__ Ints max_of(Ints a, Ints b) {
  return {maximum(a.least, b.least), maximum(a.greatest, b.greatest)};
}
__device__ __forceinline__ Ints choose(Truth c, Ints a, Ints b) {
  if (c.is_known())
    return c.may_hold ? a : b;
  return {minimum(a.least, b.least), maximum(a.greatest, b.greatest)};
}
__device__ __forceinline__ Truth choose_truth(Truth c, Truth a, Truth b) {
  return (c & a) | (!c & b) | (a & b);
}

__device__ __forceinline__ Ints wrap_add(Ints a, Ints b) {
  return {static_cast<s64>(a.least) + b.least, static_cast<s64>(a.greatest) + b.greatest};
}
__device__ __forceinline__ Ints wrap_neg(Ints a) {
  return {-static_cast<s64>(a.greatest), -static_cast<s64>(a.least)};
}
__device__ __forceinline__ Ints wrap_sub(Ints a, Ints b) {
  return {static_cast<s64>(a.least) - b.greatest, static_cast<s64>(a.greatest) - b.least};
}
__device__ __forceinline__ Ints wrap_mul(Ints a, Ints b) {
  s64 least = static_cast<s64>(a.least) * b.least, greatest = least;
  const s64 others[3] = {static_cast<s64>(a.least) * b.greatest,
                         static_cast<s64>(a.greatest) * b.least,
                         static_cast<s64>(a.greatest) * b.greatest};
#pragma unroll
  for (s64 other : others)
    least = min_of(least, other), greatest = max_of(greatest, other);
  return {least, greatest};
}
__device__ __forceinline__ Ints wrap_abs(Ints a) {
  const Ints turned = wrap_neg(a);
  if (a.least >= 0 || a.least == LEAST_INT)
    return a.least >= 0 ? a : Ints::any();
  return a.greatest <= 0 ? turned : Ints(0, maximum(turned.greatest, a.greatest));
}
__device__ __forceinline__ Ints floor_div(Ints a, int c) {
  if (c == -1)
    return wrap_neg(a);
  const int of_least = floor_div(a.least, c), of_greatest = floor_div(a.greatest, c);
  return {minimum(of_least, of_greatest), maximum(of_least, of_greatest)};
}
__device__ __forceinline__ Ints floor_mod(Ints a, int c) {
  if (c == -1 || floor_div(a.least, c) == floor_div(a.greatest, c))
    return {floor_mod(a.least, c), floor_mod(a.greatest, c)};
  return c > 0 ? Ints(0, c - 1) : Ints(c + 1, 0);
}

/// The range of some elements of a table. A warp reads them if they are few and in one row. Of
/// others the range is that of all ints.
__device__ __forceinline__ Ints range_of_table(const int* table, int rows, int columns, Ints i,
                                               Ints j) {
  constexpr int MOST = 1024;
  const Ints row = min_of(max_of(i, 0), rows - 1), column = min_of(max_of(j, 0), columns - 1);
  if (row.least != row.greatest || column.greatest - column.least >= MOST)
    return Ints::any();
  int least = GREATEST_INT, greatest = LEAST_INT;
  for (int at = column.least + lane_id(); at <= column.greatest; at += 32) {
    const int found = __ldg(table + (static_cast<s64>(row.least) * columns + at));
    least = minimum(least, found), greatest = maximum(greatest, found);
  }
  return {least_of_warp(least), greatest_of_warp(greatest)};
}
