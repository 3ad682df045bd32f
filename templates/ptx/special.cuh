//===- ptx/special.cuh - Special registers ---------------------------------===//
//
// Read where they are asked for: what is computed from threadIdx and blockIdx is kept in registers
// from the first time on that something like it was.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

__device__ __forceinline__ int read_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int read_block_x() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ int read_block_y() {
  int y;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  return y;
}
__device__ __forceinline__ void read_block_yz(int& y, int& z) {
  asm volatile("mov.u32 %0, %%ctaid.y; mov.u32 %1, %%ctaid.z;" : "=r"(y), "=r"(z));
}
/// Gives the same number, which the compiler takes for another, so that what is computed from it is
/// computed again and takes no register in between.
template <typename Int> __device__ __forceinline__ Int opaque(Int x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// What depends on `x` comes behind all of `words` in ptxas' order too, which moves arithmetic
/// across waits and barriers. `zero` is 0, which it cannot know.
template <int N, int M>
__device__ __forceinline__ void order_behind(u32& x, const u32 (&words)[N][M], u32 zero) {
  u32 all = 0;
#pragma unroll
  for (int i = 0; i < N * M; ++i)
    all |= words[i / M][i % M];
  x |= all & zero;
}
/// Which lanes of the warp come before this one, are this one, come after it: a bit a lane.
struct LaneMasks {
  u32 below, self, above;
};
__device__ __forceinline__ LaneMasks read_lane_masks() {
  LaneMasks masks;
  asm("mov.u32 %0, %%lanemask_lt; mov.u32 %1, %%lanemask_eq; mov.u32 %2, %%lanemask_gt;"
      : "=r"(masks.below), "=r"(masks.self), "=r"(masks.above));
  return masks;
}
