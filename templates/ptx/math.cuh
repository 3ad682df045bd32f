//===- ptx/math.cuh - Scalar functions, one instruction each ---------------===//
#pragma once

/// 2^x; below 2^-126 the result is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// The larger number; NaN where either is NaN, so that no maximum hides one.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
/// The larger number; a NaN loses against a number.
__device__ __forceinline__ float max_number(float a, float b) {
  float y;
  asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
/// max_nan(a, |b|) in one instruction.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float y;
  asm("{ .reg .f32 size; abs.f32 size, %2; max.NaN.f32 %0, %1, size; }" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
