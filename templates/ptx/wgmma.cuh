//===- ptx/wgmma.cuh - Warpgroup matrix products, sm_90a --------------------===//
//
// D(64 x 64) += A(64 x 32 bytes) B(32 bytes x 64), asynchronously; warp w of the group holds rows
// 16w..16w+15 of D and of an A in registers, laid out as mma.sync's. A and B in shared memory are
// rows of 32 bytes within a swizzled tile (tile/memory/swizzle.cuh), B's 64 columns being its rows.
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
/// and its swizzle, in the bit fields of the PTX ISA's matrix descriptor. Its lower half is the
/// address in units of 16 bytes, to which more of them may be added. A transposed operand of more
/// than 64 columns goes on in the next panel, `PANEL` bytes behind.
template <int PITCH_BYTES>
constexpr u64 DESCRIPTOR_HIGH = (PITCH_BYTES == 128  ? 1u
                                 : PITCH_BYTES == 64 ? 2u
                                                     : 0u)
                                    << 30 |
                                8 * PITCH_BYTES >> 4;
template <int PANEL = 16> __device__ __forceinline__ u32 descriptor_low(u32 address) {
  return (static_cast<u32>(PANEL >> 4) << 16) + (address >> 4);
}
template <int PITCH_BYTES, int PANEL = 16>
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  return DESCRIPTOR_HIGH<PITCH_BYTES> << 32 | descriptor_low<PANEL>(address);
}

/// This one takes an address in units of 16 bytes: a sum of those costs one instruction.
template <int PITCH_BYTES, int PANEL = 16>
__device__ __forceinline__ u64 descriptor_in_units(u32 units) {
  const u64 of_0 = matrix_descriptor<PITCH_BYTES, PANEL>(0);
  u64 descriptor;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(descriptor)
      : "r"(units + static_cast<u32>(of_0)), "r"(static_cast<u32>(of_0 >> 32)));
  return descriptor;
}

#define ACCUMULATORS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ACCUMULATORS_64                                                                            \
  ACCUMULATORS_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "  \
                  "%31"
#define ACCUMULATORS_128                                                                           \
  ACCUMULATORS_64                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ACCUMULATOR_QUAD(type, j)                                                                  \
  "+" type(d[j][0]), "+" type(d[j][1]), "+" type(d[j][2]), "+" type(d[j][3])
#define ACCUMULATOR_OPERANDS_32(type)                                                              \
  ACCUMULATOR_QUAD(type, 0), ACCUMULATOR_QUAD(type, 1), ACCUMULATOR_QUAD(type, 2),                 \
      ACCUMULATOR_QUAD(type, 3)
#define ACCUMULATOR_OPERANDS_64(type)                                                              \
  ACCUMULATOR_OPERANDS_32(type), ACCUMULATOR_QUAD(type, 4), ACCUMULATOR_QUAD(type, 5),             \
      ACCUMULATOR_QUAD(type, 6), ACCUMULATOR_QUAD(type, 7)
#define ACCUMULATOR_OPERANDS_128(type)                                                             \
  ACCUMULATOR_OPERANDS_64(type), ACCUMULATOR_QUAD(type, 8), ACCUMULATOR_QUAD(type, 9),             \
      ACCUMULATOR_QUAD(type, 10), ACCUMULATOR_QUAD(type, 11), ACCUMULATOR_QUAD(type, 12),          \
      ACCUMULATOR_QUAD(type, 13), ACCUMULATOR_QUAD(type, 14), ACCUMULATOR_QUAD(type, 15)

// The numbers of the operands behind so many columns of accumulators: A and B in shared memory, or
// A in registers and B, and then the switch `accumulate`.
#define TILES_32 "%16, %17"
#define TILES_64 "%32, %33"
#define TILES_128 "%64, %65"
#define SWITCH_OF_TILES_32 "%18"
#define SWITCH_OF_TILES_64 "%34"
#define SWITCH_OF_TILES_128 "%66"
#define REGISTERS_64 "{%32, %33, %34, %35}, %36"
#define REGISTERS_128 "{%64, %65, %66, %67}, %68"
#define SWITCH_OF_REGISTERS_64 "%37"
#define SWITCH_OF_REGISTERS_128 "%69"

// One product of 64 rows and `columns`, whose `format` is its depth and its types. `type` is the
// registers' of its sums; behind the switch stand the `signs` and the transpositions of 16 bits.
#define WGMMA(columns, format, type, signs, a_and_b, on, ...)                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " on ", 0;\n"                                       \
               "wgmma.mma_async.sync.aligned.m64n" #columns format " {" ACCUMULATORS_##columns     \
               "}, " a_and_b ", p" signs "; }"                                                     \
               : ACCUMULATOR_OPERANDS_##columns(type)                                              \
               : __VA_ARGS__)
#define WGMMA_OF_TILES(columns, format, type, signs)                                               \
  WGMMA(columns, format, type, signs, TILES_##columns, SWITCH_OF_TILES_##columns, "l"(a), "l"(b),  \
        "r"(static_cast<int>(accumulate)))
#define WGMMA_OF_REGISTERS(columns, format, type, signs)                                           \
  WGMMA(columns, format, type, signs, REGISTERS_##columns, SWITCH_OF_REGISTERS_##columns,          \
        "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
#define WGMMA_FROM_ZERO(columns, format, type, signs)                                              \
  WGMMA(columns, format, type, signs, REGISTERS_##columns, "0", "r"(a[0]), "r"(a[1]), "r"(a[2]),   \
        "r"(a[3]), "l"(b))

/// Both operands in shared memory; D starts from zero unless `accumulate`.
__device__ __forceinline__ void wgmma_s8(int (*d)[4], u64 a, u64 b, bool accumulate) {
  WGMMA_OF_TILES(64, "k32.s32.s8.s8", "r", "");
}
/// A in registers.
template <bool SIGNED>
__device__ __forceinline__ void wgmma_8(int (*d)[4], const u32 (&a)[4], u64 b, bool accumulate) {
  if constexpr (SIGNED)
    WGMMA_OF_REGISTERS(64, "k32.s32.s8.s8", "r", "");
  else
    WGMMA_OF_REGISTERS(64, "k32.s32.u8.s8", "r", "");
}
/// These are the two with 128 columns.
__device__ __forceinline__ void wgmma_s8_wide(int (*d)[4], u64 a, u64 b, bool accumulate) {
  WGMMA_OF_TILES(128, "k32.s32.s8.s8", "r", "");
}
template <bool SIGNED>
__device__ __forceinline__ void wgmma_8_wide(int (*d)[4], const u32 (&a)[4], u64 b,
                                             bool accumulate) {
  if constexpr (SIGNED)
    WGMMA_OF_REGISTERS(128, "k32.s32.s8.s8", "r", "");
  else
    WGMMA_OF_REGISTERS(128, "k32.s32.u8.s8", "r", "");
}

// The products of 16-bit floats, for each of the two types.

/// Both operands in shared memory. Sums are FP32, or integers that are their bits.
template <typename T, typename Sum>
__device__ __forceinline__ void wgmma_16(Sum (*d)[4], u64 a, u64 b, bool accumulate);
/// This one has 128 columns; sums are integers that are FP32's bits.
template <typename T>
__device__ __forceinline__ void wgmma_16_wide(int (*d)[4], u64 a, u64 b, bool accumulate);
/// A in registers.
template <typename T>
__device__ __forceinline__ void wgmma_16_registers(float (*d)[4], const u32 (&a)[4], u64 b,
                                                   bool accumulate);
/// This one has B with its 64 columns contiguous: rows of 128 bytes are tokens of the sum.
template <typename T>
__device__ __forceinline__ void wgmma_16_transposed(float (*d)[4], const u32 (&a)[4], u64 b,
                                                    bool accumulate);
/// Transposed with 128 columns, of two panels.
template <typename T>
__device__ __forceinline__ void wgmma_16_transposed_wide(float (*d)[4], const u32 (&a)[4], u64 b,
                                                         bool accumulate);
/// Both operands in shared memory, B transposed, of 32, 64 or 128 columns; A too if A_TRANSPOSED:
/// its 64 rows are contiguous then.
template <typename T, int COLUMNS, bool A_TRANSPOSED>
__device__ __forceinline__ void wgmma_16_tiles(float (*d)[4], u64 a, u64 b, bool accumulate);

#define WGMMA_16(name, Sum, A, product)                                                            \
  template <> __device__ __forceinline__ void name(Sum(*d)[4], A, u64 b, bool accumulate) {        \
    product;                                                                                       \
  }
#define WGMMA_16_OF(T, format)                                                                     \
  WGMMA_16(wgmma_16<T>, float, u64 a, WGMMA_OF_TILES(64, format, "f", ", 1, 1, 0, 0"))             \
  WGMMA_16(wgmma_16<T>, int, u64 a, WGMMA_OF_TILES(64, format, "r", ", 1, 1, 0, 0"))               \
  WGMMA_16(wgmma_16_wide<T>, int, u64 a, WGMMA_OF_TILES(128, format, "r", ", 1, 1, 0, 0"))         \
  WGMMA_16(wgmma_16_registers<T>, float, const u32(&a)[4],                                         \
           WGMMA_OF_REGISTERS(64, format, "f", ", 1, 1, 0"))                                       \
  WGMMA_16(wgmma_16_transposed<T>, float, const u32(&a)[4],                                        \
           WGMMA_OF_REGISTERS(64, format, "f", ", 1, 1, 1"))                                       \
  WGMMA_16(wgmma_16_transposed_wide<T>, float, const u32(&a)[4],                                   \
           WGMMA_OF_REGISTERS(128, format, "f", ", 1, 1, 1"))                                      \
  WGMMA_16((wgmma_16_tiles<T, 32, true>), float, u64 a,                                            \
           WGMMA_OF_TILES(32, format, "f", ", 1, 1, 1, 1"))                                        \
  WGMMA_16((wgmma_16_tiles<T, 64, false>), float, u64 a,                                           \
           WGMMA_OF_TILES(64, format, "f", ", 1, 1, 0, 1"))                                        \
  WGMMA_16((wgmma_16_tiles<T, 64, true>), float, u64 a,                                            \
           WGMMA_OF_TILES(64, format, "f", ", 1, 1, 1, 1"))                                        \
  WGMMA_16((wgmma_16_tiles<T, 128, false>), float, u64 a,                                          \
           WGMMA_OF_TILES(128, format, "f", ", 1, 1, 0, 1"))
WGMMA_16_OF(bf16, "k16.f32.bf16.bf16")
WGMMA_16_OF(fp16, "k16.f32.f16.f16")

/// A of bf16 in registers, 16 summed columns; D starts from zero.
__device__ __forceinline__ void wgmma_bf16_start(int (*d)[4], const u32 (&a)[4], u64 b) {
  WGMMA_FROM_ZERO(64, "k16.f32.bf16.bf16", "r", ", 1, 1, 0");
}
__device__ __forceinline__ void wgmma_bf16_start_wide(int (*d)[4], const u32 (&a)[4], u64 b) {
  WGMMA_FROM_ZERO(128, "k16.f32.bf16.bf16", "r", ", 1, 1, 0");
}

/// Keeps the compiler from touching accumulators before the wait that stands in front of this.
__device__ __forceinline__ void hold(int (&d)[4]) {
  asm volatile("" : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])::"memory");
}
__device__ __forceinline__ void hold(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}
