//===- base.cuh - Types and constants of all device code -------------------===//
//
// Generated source includes no header of CUDA's or C++'s, so that a compile needs no include path.
//
//===----------------------------------------------------------------------===//
#pragma once

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

/// Tokens in one tile of a transposed copy: channels x 64 tokens, contiguous in memory.
constexpr int TOKENS_PER_TILE = 64;

/// q_rows[head][tile of 64 queries][row vector][slot]: what the attention kernels read per query.
constexpr int ROW_SCALE = 0; ///< value of one level of a score, softmax scale and log2(e) included
/// Forward: the score shift of K-smoothing. Backward: lse in log2 units, less the exponent e by
/// which the query's row of dout_rows was divided.
constexpr int ROW_SHIFT = 1;
constexpr int ROW_MINUS_DELTA = 2; ///< backward: where dP starts from, times 2^-e
/// Of key 0 where it is computed separately. Forward: its score in log2 units. Backward: its dS.
constexpr int ROW_SINK = 3;
constexpr int ROW_VECTORS = 4;
/// Scales of a transposed copy: [head][unit of channel tokens][channel vector][slot]. A unit whose
/// values are all zero has a scale too, so that sums can be brought from any unit to any other
/// (tile/channel_scale.cuh).
constexpr int CHANNEL_SCALE = 0;   ///< value of one level
constexpr int CHANNEL_INVERSE = 1; ///< levels per unit
constexpr int CHANNEL_VECTORS = 2;

/// k8_scale[head][tile of 128 keys][lane of a quad][32 keys]: one scale for the 8 keys of 32 that
/// one lane of a quad holds as columns of scores, 2t, 2t+1, 2t+8, 2t+9, .. 2t+25 of lane t; keys g
/// and g + 8 are of one lane, so that as rows they share it too.
constexpr int KEYS_A_SCALE = 8;
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
