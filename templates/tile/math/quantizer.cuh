//===- tile/math/quantizer.cuh - psi: FP32 to 8-bit integers with a shared scale ---===//
//
// psi(x) = round(x / scale), scale = max|x| / levels (SageBwd, section 3; unsigned for P). A group
// whose maximum lies below TINY quantises to zeros with scale 0. One that holds a NaN or Inf gets a
// non-finite scale, so that whatever is computed from it is non-finite too.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"
#include "ptx/math.cuh"

constexpr float TINY = 1.5046327690525280e-36f; // 2^-119: its reciprocal is still finite
constexpr int SIGNED_LEVELS = 127;
constexpr int UNSIGNED_LEVELS = 255;
constexpr float LOG2_UNSIGNED_LEVELS = 7.99435344f;

struct Scale {
  float value;   ///< value of one level
  float inverse; ///< levels per unit
};

/// With the exact reciprocal: for the copies that a pre-pass writes.
__device__ __forceinline__ Scale exact_scale(float maximum) {
  const bool tiny = maximum < TINY;
  const bool finite = maximum < INFINITY_F;
  return {tiny ? 0.0f : (finite ? maximum * (1.0f / SIGNED_LEVELS) : __int_as_float(0x7fffffff)),
          tiny || !finite ? 0.0f : __fdiv_rn(SIGNED_LEVELS, maximum)};
}
/// With the approximate reciprocal (1 ulp): for P and dS in the main loops.
template <int LEVELS> __device__ __forceinline__ Scale fast_scale(float maximum) {
  const bool tiny = maximum < TINY;
  return {tiny ? 0.0f : maximum * (1.0f / LEVELS),
          tiny ? 0.0f : LEVELS * reciprocal_approx(maximum)};
}

/// Maximum and sum over the 4 lanes that hold one row of an accumulator.
__device__ __forceinline__ float quad_max_nan(float x) {
  x = max_nan(x, __shfl_xor_sync(~0u, x, 1));
  return max_nan(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ void quad_max_nan(float (&rows)[2]) {
  rows[0] = quad_max_nan(rows[0]);
  rows[1] = quad_max_nan(rows[1]);
}
__device__ __forceinline__ float quad_max_number(float x) {
  x = max_number(x, __shfl_xor_sync(~0u, x, 1));
  return max_number(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
/// Maximum over all lanes of the warp.
__device__ __forceinline__ float warp_max_nan(float x) {
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2)
    x = max_nan(x, __shfl_xor_sync(~0u, x, stride));
  return x;
}
