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

constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147181f;
#define INFINITY_F __int_as_float(0x7f800000)

/// Tokens in one tile of a transposed copy: channels x 64 tokens, contiguous in memory.
constexpr int TOKENS_PER_TILE = 64;

/// q_rows[head][tile of 64 queries][row vector][slot]: what the attention kernels read per query.
constexpr int ROW_SCALE = 0; ///< value of one level of a score, softmax scale and log2(e) included
/// Forward: the score shift of K-smoothing. Backward: lse, in log2 units.
constexpr int ROW_SHIFT = 1;
constexpr int ROW_MINUS_DELTA = 2; ///< backward: where dP starts from
constexpr int ROW_VECTORS = 3;
/// q_channels[head][group of queries][channel vector][slot]: scales of the transposed copies.
constexpr int CHANNEL_Q = 0;
constexpr int CHANNEL_DOUT = 1;
constexpr int CHANNEL_VECTORS = 2;

/// 1.5 * 2^23. A product's INT32 sum that starts from these bits is, read as FP32, MAGIC + sum
/// exactly, for sums below 2^22: 255 * 127 * 128 and 127 * 127 * 256 are.
constexpr float MAGIC = 12582912.0f;
constexpr int MAGIC_BITS = 0x4B400000;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
