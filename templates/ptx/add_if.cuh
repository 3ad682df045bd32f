//===- ptx/add_if.cuh - Additions under a condition, without a branch -------===//
//
// ptxas makes a conditional `sum += x` of C++ an addition into another register and a move.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

/// Adds two or four numbers where `wanted` is not 0. What is not added may be anything.
__device__ __forceinline__ void add_if(float (&sums)[2], const float (&x)[2], u32 wanted) {
  asm("{ .reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "@p add.f32 %0, %0, %2;\n"
      "@p add.f32 %1, %1, %3; }"
      : "+f"(sums[0]), "+f"(sums[1])
      : "f"(x[0]), "f"(x[1]), "r"(wanted));
}
__device__ __forceinline__ void add_if(float (&sums)[4], const float (&x)[4], u32 wanted) {
  asm("{ .reg .pred p;\n"
      "setp.ne.u32 p, %8, 0;\n"
      "@p add.f32 %0, %0, %4;\n"
      "@p add.f32 %1, %1, %5;\n"
      "@p add.f32 %2, %2, %6;\n"
      "@p add.f32 %3, %3, %7; }"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(wanted));
}
