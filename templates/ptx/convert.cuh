//===- ptx/convert.cuh - Between 16-bit floats, FP32 and 8-bit integers ----===//
#pragma once

#include "base.cuh"

/// Two packed 16-bit floats as FP32; the low half first.
template <typename T> __device__ __forceinline__ float2 unpack(u32 pair);
template <> __device__ __forceinline__ float2 unpack<bf16>(u32 pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <> __device__ __forceinline__ float2 unpack<fp16>(u32 pair) {
  float2 x;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
      : "=f"(x.x), "=f"(x.y)
      : "r"(pair));
  return x;
}

/// Two FP32 values rounded to nearest even and packed, `low` in the low half.
template <typename T> __device__ __forceinline__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<bf16>(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <> __device__ __forceinline__ u32 pack<fp16>(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Gives the larger of a and |b| for each half; NaN where either is NaN.
template <typename T> __device__ __forceinline__ u32 max_magnitudes(u32 a, u32 b);
template <> __device__ __forceinline__ u32 max_magnitudes<bf16>(u32 a, u32 b) {
  u32 pair;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b & 0x7fff7fffu));
  return pair;
}
template <> __device__ __forceinline__ u32 max_magnitudes<fp16>(u32 a, u32 b) {
  u32 pair;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b & 0x7fff7fffu));
  return pair;
}

/// Four values rounded to nearest even, clamped and packed into bytes, the first lowest. NaN
/// becomes 0. ptxas fuses each pair of conversions and its pack into one F2IP on sm_86 and later.
__device__ __forceinline__ u32 pack_s8(float a, float b, float c, float d) {
  u32 word;
  asm("{ .reg .b32 a, b, c, d, high;\n"
      "  cvt.rni.s32.f32 a, %1; cvt.rni.s32.f32 b, %2;\n"
      "  cvt.rni.s32.f32 c, %3; cvt.rni.s32.f32 d, %4;\n"
      "  cvt.pack.sat.s8.s32.b32 high, d, c, 0;\n"
      "  cvt.pack.sat.s8.s32.b32 %0, b, a, high; }"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}
__device__ __forceinline__ u32 pack_u8(float a, float b, float c, float d) {
  u32 word;
  asm("{ .reg .b32 a, b, c, d, high;\n"
      "  cvt.rni.s32.f32 a, %1; cvt.rni.s32.f32 b, %2;\n"
      "  cvt.rni.s32.f32 c, %3; cvt.rni.s32.f32 d, %4;\n"
      "  cvt.pack.sat.u8.s32.b32 high, d, c, 0;\n"
      "  cvt.pack.sat.u8.s32.b32 %0, b, a, high; }"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}
