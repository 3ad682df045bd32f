//===- tile/math/expressions.cuh - What expressions are printed with --------------===//
//
// generator/expression.h says what each function gives. Ints wrap, which only unsigned ones may.
// Functions of floats are as exact as their instructions: tanh's error is 2^-11 of it, an eighth of
// the rounding of a row's largest score to 8 bits.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/math.cuh"

__device__ __forceinline__ int wrap_add(int a, int b) { return static_cast<u32>(a) + b; }
__device__ __forceinline__ int wrap_sub(int a, int b) { return static_cast<u32>(a) - b; }
__device__ __forceinline__ int wrap_mul(int a, int b) { return static_cast<u32>(a) * b; }
__device__ __forceinline__ int wrap_neg(int a) { return 0u - static_cast<u32>(a); }
__device__ __forceinline__ int wrap_abs(int a) { return a < 0 ? wrap_neg(a) : a; }
/// Divisors are constants, so that ptxas forms a product. INT_MIN / -1 is undefined in C++.
__device__ __forceinline__ int floor_div(int a, int c) {
  if (c == -1)
    return wrap_neg(a);
  const int quotient = a / c;
  return quotient - (a % c != 0 && (a < 0) != (c < 0));
}
__device__ __forceinline__ int floor_mod(int a, int c) {
  if (c == -1)
    return 0;
  const int rest = a % c;
  return rest != 0 && (rest < 0) != (c < 0) ? rest + c : rest;
}
template <typename T> __device__ __forceinline__ T min_of(T a, T b) { return b < a ? b : a; }
template <typename T> __device__ __forceinline__ T max_of(T a, T b) { return a < b ? b : a; }
__device__ __forceinline__ float to_float(int a) { return static_cast<float>(a); }
__device__ __forceinline__ float infinity() { return INFINITY_F; }
/// A constant divisor makes it a product.
__device__ __forceinline__ float quotient(float a, float b) { return a * (1.0f / b); }
__device__ __forceinline__ float abs_of(float a) { return fabsf(a); }
__device__ __forceinline__ float tanh_of(float a) { return tanh_approx(a); }
__device__ __forceinline__ float exp_of(float a) { return exp2_approx(LOG2_E * a); }
__device__ __forceinline__ float log_of(float a) { return LN_2 * log2_approx(a); }
__device__ __forceinline__ float sqrt_of(float a) { return sqrtf(a); }
__device__ __forceinline__ float sigmoid_of(float a) {
  return __fmaf_rn(tanh_approx(0.5f * a), 0.5f, 0.5f);
}
__device__ __forceinline__ float pow_of(float a, float b) { return powf(a, b); }

/// An element of a table, whose indices are clamped into its range.
__device__ __forceinline__ int read_table(const int* table, int rows, int columns, int i, int j) {
  i = minimum(maximum(i, 0), rows - 1), j = minimum(maximum(j, 0), columns - 1);
  return __ldg(table + (static_cast<s64>(i) * columns + j));
}
