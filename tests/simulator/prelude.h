//===- prelude.h - CUDA C++ as a C++ compiler sees it -----------------------===//
//
// This file has what the templates use of the language and its built-in functions, no more.
// Instructions are in ptx/. The text of a kernel follows.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "lane.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ [[gnu::noinline]]
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
/// A block is run by one thread of the CPU: what is that thread's is the block's.
#define __shared__ thread_local
#define __builtin_assume(condition)                                                                \
  ((condition) ? void() : simulator::lane().fail("false assumption in line", __LINE__))
/// Nothing is left but empty ones, which steer ptxas; instructions are in ptx/.
#define asm(...)

#define threadIdx (simulator::lane().thread)
#define blockIdx (simulator::lane().block)
#define gridDim (simulator::lane().blocks)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float powf(float x, float y) { return __builtin_powf(x, y); }
template <class T> T __ldg(const T* x) { return *x; }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}

inline unsigned long __cvta_generic_to_shared(const void* place) {
  return static_cast<unsigned long>(static_cast<const char*>(place) - simulator::lane().shared);
}

namespace simulator {

/// Holds what all lanes of a warp have brought.
template <class T> struct Lanes {
  void* const* all;
  T& operator[](int lane) const { return *static_cast<T*>(all[lane]); }
};
template <class T, class Operate> void together(const char* what, int line, T& mine, Operate) {
  lane().together(what, line, &mine, [](void* const* lanes) { Operate()(Lanes<T>{lanes}); });
}

} // namespace simulator

inline void __syncthreads(int line = __builtin_LINE()) { simulator::lane().wait_for_block(line); }

inline void __syncwarp(int line = __builtin_LINE()) {
  int nothing = 0;
  simulator::together("__syncwarp", line, nothing, [](simulator::Lanes<int>) {});
}

namespace simulator {

/// The value of lane `from`, of which each lane asks for one.
template <class T> T shuffled(T value, int from, int line) {
  unsigned long long bits = 0;
  static_assert(sizeof(T) <= sizeof(bits));
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = lane().shuffle(bits, from, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
inline int number_in_warp() { return static_cast<int>(lane().thread.x % 32); }

} // namespace simulator

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int line = __builtin_LINE()) {
  return simulator::shuffled(value, simulator::number_in_warp() ^ with, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int by, int line = __builtin_LINE()) {
  const int own = simulator::number_in_warp();
  return simulator::shuffled(value, own < by ? own : own - by, line);
}
template <class T> T __shfl_sync(unsigned mask, T value, int of, int line = __builtin_LINE()) {
  return simulator::shuffled(value, of & 31, line);
}

inline bool __any_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
  simulator::together("vote.sync", line, vote, [](simulator::Lanes<bool> lanes) {
    bool any = false;
    for (int i = 0; i < 32; ++i)
      any |= lanes[i];
    for (int i = 0; i < 32; ++i)
      lanes[i] = any;
  });
  return vote;
}

inline unsigned __ballot_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
  unsigned votes = vote;
  simulator::together("vote.sync", line, votes, [](simulator::Lanes<unsigned> lanes) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i)
      all |= lanes[i] << i;
    for (int i = 0; i < 32; ++i)
      lanes[i] = all;
  });
  return votes;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }

inline int __reduce_add_sync(unsigned mask, int value, int line = __builtin_LINE()) {
  simulator::together("redux.sync", line, value, [](simulator::Lanes<int> lanes) {
    int sum = 0;
    for (int i = 0; i < 32; ++i)
      sum += lanes[i];
    for (int i = 0; i < 32; ++i)
      lanes[i] = sum;
  });
  return value;
}

/// A place in shared memory: asking for it makes the thread that runs the block have it.
static thread_local char simulator_shared;
extern "C" void* simulator_shared_memory() { return &simulator_shared; }
