//===- ptx/ldmatrix.cuh - Fragments from and to shared memory --------------===//
#pragma once

#include "base.cuh"

/// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// Loads the same, with each matrix of 8 x 8 elements of 16 bits transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// An 8 x 8 matrix of 16-bit elements, of which lane l has row l / 4, columns 2 (l % 4) and the
/// next, transposed.
__device__ __forceinline__ u32 transpose_8x8(u32 two) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(two));
  return turned;
}

#if __CUDA_ARCH__ >= 900
/// The inverse of ldmatrix_x4().
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif
