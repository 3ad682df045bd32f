//===- base.cuh - Types and constants of all device code -------------------===//
//
// Generated source includes no header of CUDA's or C++'s, so that a compile needs no include path.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/copies.cuh"

using s8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using s64 = long long;

/// 16-bit floats, held as their bits: what they mean is in ptx/convert.cuh.
struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

/// CUDA's opaque description of a tensor in global memory, which the host has encoded.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147181f;
#define INFINITY_F __int_as_float(0x7f800000)

/// The place of a key in k8_scale (layouts/copies.cuh).
__device__ __forceinline__ int key_scale_place(int key) {
  return key / 128 * 16 + (key >> 1 & 3) * 4 + (key >> 5 & 3);
}

/// 1.5 * 2^23. A product's INT32 sum that starts from these bits is, read as FP32, exactly
/// MAGIC + sum, if sums are below 2^22.
constexpr float MAGIC = 12582912.0f;
constexpr int MAGIC_BITS = 0x4B400000;
/// Whether this holds for sums of `count` products of integers up to `a` and `b`.
constexpr bool exact_with_magic(int a, int b, int count) { return a * b * count < 1 << 22; }

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
