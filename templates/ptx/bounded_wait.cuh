//===- ptx/bounded_wait.cuh - Waits that end, for debugging -------------------===//
//
// With SAGEBWD_BOUNDED_WAITS, the kernel's name, a wait that takes as long as no kernel does ends
// the kernel as a failed assertion that says which barrier it was for. The assertion is a call, for
// which ptxas serialises all products of wgmma (C7510): what depends on their overlap is not seen.
// Without it nothing here leaves machine code.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

#ifdef SAGEBWD_BOUNDED_WAITS
constexpr u64 LONGEST_WAIT_NS = 10ull * 1000 * 1000 * 1000;
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, unsigned long char_bytes);
__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
/// Says where a kernel's own shared memory begins, as the kernel declares it itself.
__device__ __forceinline__ u32 first_own_byte() {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return static_cast<u32>(__cvta_generic_to_shared(shared_memory));
}

/// From its construction on.
struct WaitBound {
  u64 start = nanoseconds();
  __device__ __forceinline__ void check(const char* what, const char* kind, u32 number) const {
    if (nanoseconds() - start > LONGEST_WAIT_NS)
      __assertfail(what, kind, number, SAGEBWD_BOUNDED_WAITS, 1);
  }
};

/// The hardware's named barriers cannot be asked whether they are complete. So threads are counted
/// in shared memory, behind what the kernel itself has: 4 bytes for each of 16 barriers.
__device__ __forceinline__ u32 arrivals_at(int barrier) {
  return first_own_byte() + SAGEBWD_ARRIVALS_OFFSET + 4 * barrier;
}
/// One thread calls this before the block's first __syncthreads().
__device__ __forceinline__ void begin_counting_arrivals() {
  for (int barrier = 0; barrier < 16; ++barrier)
    asm volatile("st.shared.u32 [%0], 0;" ::"r"(arrivals_at(barrier)) : "memory");
}
/// How many had come before.
__device__ __forceinline__ u32 count_arrival(int barrier) {
  u32 before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(arrivals_at(barrier))
               : "memory");
  return before;
}
template <int THREADS> __device__ __forceinline__ void wait_for_arrivals(int barrier) {
  const WaitBound bound;
  const u32 all = (count_arrival(barrier) / THREADS + 1) * THREADS;
  u32 come;
  do {
    bound.check("other warps", "named barrier", barrier);
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                 : "=r"(come)
                 : "r"(arrivals_at(barrier))
                 : "memory");
  } while (static_cast<int>(come - all) < 0);
  __syncwarp();
}
#else
struct WaitBound {};
__device__ __forceinline__ void begin_counting_arrivals() {}
#endif
