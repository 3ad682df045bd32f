//===- ptx/order.cuh - Counters by which blocks wait for one another ---------===//
#pragma once

#include "base.cuh"
#include "ptx/bounded_wait.cuh"

/// Adds 1 to a counter in global memory and gives what it was before.
__device__ __forceinline__ u32 take_ticket(u32* counter) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
/// Adds 1 to a counter, behind all that the block has written and added before a barrier that came
/// before this call.
__device__ __forceinline__ void count_behind(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
/// A counter. What comes behind this comes behind what others did before they counted.
__device__ __forceinline__ u32 read_counter(const u32* counter) {
  u32 count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
/// Waits until a counter, of which `seen` has been read, has come to `count`: that is, for `what`.
__device__ __forceinline__ void wait_for_count(const u32* counter, u32 seen, u32 count,
                                               [[maybe_unused]] const char* what) {
  [[maybe_unused]] const WaitBound bound;
  while (seen != count) {
#ifdef SAGEBWD_BOUNDED_WAITS
    bound.check(what, "counter in global memory, which should be", count);
#endif
    seen = read_counter(counter);
  }
}
