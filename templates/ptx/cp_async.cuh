//===- ptx/cp_async.cuh - Asynchronous copies into shared memory -----------===//
#pragma once

#include "base.cuh"

/// 16 bytes from global to shared memory.
__device__ __forceinline__ void cp_async_16(u32 shared_address, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global)
               : "memory");
}
/// Copies only where `wanted`, without a branch.
__device__ __forceinline__ void cp_async_16_if(u32 shared_address, const void* global,
                                               bool wanted) {
  asm volatile("{ .reg .pred p;\n"
               "setp.ne.u32 p, %2, 0;\n"
               "@p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(shared_address),
               "l"(global), "r"(static_cast<u32>(wanted))
               : "memory");
}
/// Writes zeros where not `valid`; nothing is read then.
__device__ __forceinline__ void cp_async_16_or_zeros(u32 shared_address, const void* global,
                                                     bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(global),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
