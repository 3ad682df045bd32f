//===- base.cuh - Types and constants of all device code -------------------===//
//
// Generated source includes no header of CUDA's or C++'s, so that a compile needs no include path.
//
//===----------------------------------------------------------------------===//

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

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int minimum(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int maximum(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
