//===- ptx/wgmma.cuh - Warpgroup matrix products, sm_90a --------------------===//
//
// D(64 x 64) += A(64 x 32 bytes) B(32 bytes x 64), asynchronously; warp w of the group holds rows
// 16w..16w+15 of D and of an A in registers, laid out as mma.sync's. A and B in shared memory are
// rows of 32 bytes within a swizzled tile (tile/shared_tile.cuh), B's 64 columns being its rows.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

/// Orders this warpgroup's register writes before its next products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `PENDING` committed groups are under way.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/// Makes shared memory written by this thread visible to wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Describes a tile with rows of 64 or 128 bytes: its address, the bytes from 8 rows to the next 8,
/// and its swizzle, in the bit fields of the PTX ISA's matrix descriptor.
template <int PITCH_BYTES> __device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  constexpr u64 SWIZZLE = PITCH_BYTES == 128 ? 1 : 2;
  return SWIZZLE << 62 | static_cast<u64>(8 * PITCH_BYTES >> 4) << 32 | 1ull << 16 |
         static_cast<u64>((address & 0x3ffff) >> 4);
}

#define ACCUMULATORS                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                        \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ACCUMULATOR_QUAD(type, j)                                                                  \
  "+" type(d[j][0]), "+" type(d[j][1]), "+" type(d[j][2]), "+" type(d[j][3])
#define ACCUMULATOR_OPERANDS(type)                                                                 \
  ACCUMULATOR_QUAD(type, 0), ACCUMULATOR_QUAD(type, 1), ACCUMULATOR_QUAD(type, 2),                 \
      ACCUMULATOR_QUAD(type, 3), ACCUMULATOR_QUAD(type, 4), ACCUMULATOR_QUAD(type, 5),             \
      ACCUMULATOR_QUAD(type, 6), ACCUMULATOR_QUAD(type, 7)

/// Both operands in shared memory; D starts from zero unless `accumulate`.
__device__ __forceinline__ void wgmma_s8(int (*d)[4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " ACCUMULATORS ", %32, %33, p; }"
               : ACCUMULATOR_OPERANDS("r")
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
/// A in registers.
template <bool SIGNED>
__device__ __forceinline__ void wgmma_8(int (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  if constexpr (SIGNED)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " ACCUMULATORS
                 ", {%32, %33, %34, %35}, %36, p; }"
                 : ACCUMULATOR_OPERANDS("r")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)));
  else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 " ACCUMULATORS
                 ", {%32, %33, %34, %35}, %36, p; }"
                 : ACCUMULATOR_OPERANDS("r")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)));
}
/// The same two with 128 columns.
#define WIDE_ACCUMULATORS                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                        \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define WIDE_ACCUMULATOR_OPERANDS(type)                                                            \
  ACCUMULATOR_OPERANDS(type), ACCUMULATOR_QUAD(type, 8), ACCUMULATOR_QUAD(type, 9),                \
      ACCUMULATOR_QUAD(type, 10), ACCUMULATOR_QUAD(type, 11), ACCUMULATOR_QUAD(type, 12),          \
      ACCUMULATOR_QUAD(type, 13), ACCUMULATOR_QUAD(type, 14), ACCUMULATOR_QUAD(type, 15)

__device__ __forceinline__ void wgmma_s8_wide(int (*d)[4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " WIDE_ACCUMULATORS
               ", %64, %65, p; }"
               : WIDE_ACCUMULATOR_OPERANDS("r")
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
template <bool SIGNED>
__device__ __forceinline__ void wgmma_8_wide(int (*d)[4], const u32 (&a)[4], u64 b,
                                             bool accumulate) {
  if constexpr (SIGNED)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " WIDE_ACCUMULATORS
                 ", {%64, %65, %66, %67}, %68, p; }"
                 : WIDE_ACCUMULATOR_OPERANDS("r")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)));
  else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 " WIDE_ACCUMULATORS
                 ", {%64, %65, %66, %67}, %68, p; }"
                 : WIDE_ACCUMULATOR_OPERANDS("r")
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "r"(static_cast<int>(accumulate)));
}
/// 16-bit floats, both operands in shared memory. Sums are FP32, or integers that are their bits.
template <typename T, typename Sum>
__device__ __forceinline__ void wgmma_16(Sum (*d)[4], u64 a, u64 b, bool accumulate);
template <>
__device__ __forceinline__ void wgmma_16<bf16>(float (*d)[4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " ACCUMULATORS
               ", %32, %33, p, 1, 1, 0, 0; }"
               : ACCUMULATOR_OPERANDS("f")
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_16<bf16>(int (*d)[4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " ACCUMULATORS
               ", %32, %33, p, 1, 1, 0, 0; }"
               : ACCUMULATOR_OPERANDS("r")
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_16<fp16>(float (*d)[4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS
               ", %32, %33, p, 1, 1, 0, 0; }"
               : ACCUMULATOR_OPERANDS("f")
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_16<fp16>(int (*d)[4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS
               ", %32, %33, p, 1, 1, 0, 0; }"
               : ACCUMULATOR_OPERANDS("r")
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

/// A in registers, B with its 64 columns contiguous: rows of 128 bytes are tokens of the sum.
template <typename T>
__device__ __forceinline__ void wgmma_16_transposed(float (*d)[4], const u32 (&a)[4], u64 b,
                                                    bool accumulate);
template <>
__device__ __forceinline__ void wgmma_16_transposed<bf16>(float (*d)[4], const u32 (&a)[4], u64 b,
                                                          bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " ACCUMULATORS
               ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
               : ACCUMULATOR_OPERANDS("f")
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                 "r"(static_cast<int>(accumulate)));
}
template <>
__device__ __forceinline__ void wgmma_16_transposed<fp16>(float (*d)[4], const u32 (&a)[4], u64 b,
                                                          bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS
               ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
               : ACCUMULATOR_OPERANDS("f")
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                 "r"(static_cast<int>(accumulate)));
}

/// Keeps the compiler from touching accumulators before the wait that stands in front of this.
__device__ __forceinline__ void hold(int (&d)[4]) {
  asm volatile("" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])::"memory");
}
__device__ __forceinline__ void hold(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}
