//===- ptx/reduce.cuh - Sums and maxima in global memory ----------------------===//
#pragma once

#include "base.cuh"

/// Adds to floats in global memory, in whatever order blocks come; nothing comes back.
__device__ __forceinline__ void reduce_add(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void reduce_add_4(float* sums, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

/// Raises a float in global memory, in whatever order blocks come. -inf is the lowest, and the NaN
/// 0x7fffffff stays. Floats that are not negative are in the order of ints; others, as unsigned
/// ints, in the opposite order, above all that are not negative.
__device__ __forceinline__ void raise_maximum(float* maximum, float x) {
  asm volatile("{ .reg .pred negative;\n"
               "setp.lt.f32 negative, %1, 0f00000000;\n"
               "@negative red.relaxed.gpu.global.min.u32 [%0], %2;\n"
               "@!negative red.relaxed.gpu.global.max.s32 [%0], %2; }" ::"l"(maximum),
               "f"(x), "r"(__float_as_int(x + 0.0f)) // -0 is +0
               : "memory");
}
