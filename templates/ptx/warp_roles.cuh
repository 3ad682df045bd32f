//===- ptx/warp_roles.cuh - What warps of different duties need, sm_90a ----===//
#pragma once

#include "base.cuh"
#include "ptx/bounded_wait.cuh"

/// Named barriers of `THREADS` threads, whole warps: one waits, the other only arrives. Barrier 0
/// belongs to __syncthreads().
template <int THREADS> __device__ __forceinline__ void named_barrier_sync(int barrier) {
#ifdef SAGEBWD_BOUNDED_WAITS
  wait_for_arrivals<THREADS>(barrier);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
#endif
}
template <int THREADS> __device__ __forceinline__ void named_barrier_arrive(int barrier) {
#ifdef SAGEBWD_BOUNDED_WAITS
  count_arrival(barrier);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
#endif
}

/// Registers a thread may use from here on, of a warpgroup's all threads: fewer, or more once
/// others have given theirs. A failed assertion is a call that takes more than a producer keeps:
/// where waits may fail, all have as many as at the launch.
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
#ifndef SAGEBWD_BOUNDED_WAITS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
#ifndef SAGEBWD_BOUNDED_WAITS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

/// Tells ptxas that all lanes of a warp have computed the same number, so that what follows from it
/// takes uniform registers.
__device__ __forceinline__ int common_to_warp(int x) { return __shfl_sync(~0u, x, 0); }

/// Whether this lane is the one of its warp, all of whose lanes are here, that acts for all.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{ .reg .pred p;\n"
               "elect.sync _|p, 0xffffffff;\n"
               "selp.u32 %0, 1, 0, p; }"
               : "=r"(is));
  return is != 0;
}
