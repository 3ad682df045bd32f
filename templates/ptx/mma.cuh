//===- ptx/mma.cuh - Warp-level matrix products, sm_80 and later -----------===//
//
// D(16 x 8) = A(16 x 32 bytes) B(32 bytes x 8) + C(16 x 8); a separate C lets a sum start anywhere
// without copies. With g = lane / 4 and t = lane % 4:
//   A: a[0] row g, bytes 4t..4t+3;  a[1] row g+8;  a[2], a[3] the same rows, 16 bytes further
//   B: b[0] column g, bytes 4t..4t+3;  b[1] 16 bytes further
//   D: d[0], d[1] row g, columns 2t, 2t+1;  d[2], d[3] row g+8
// 8-bit and 16-bit elements share this layout in bytes: k = 32 of one, 16 of the other.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

__device__ __forceinline__ void mma_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                       const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

/// A unsigned, B signed.
__device__ __forceinline__ void mma_u8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                       const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

/// 16-bit floats, FP32 sums.
template <typename T>
__device__ __forceinline__ void mma_16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                       const float (&c)[4]);

template <>
__device__ __forceinline__ void mma_16<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                             const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

template <>
__device__ __forceinline__ void mma_16<fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                             const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

/// FP16, and sums in FP16 too: d[0] has columns 2t and 2t + 1 of row g, d[1] of row g + 8.
__device__ __forceinline__ void mma_16_half_sums(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1,
                                                 const u32 (&c)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, "
      "{%2, %3, %4, %5}, {%6, %7}, {%8, %9};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]));
}
