//===- ptx/reduce.cuh - Sums in global memory -------------------------------===//
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
