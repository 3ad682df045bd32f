//===- ptx/mbarrier.cuh - Barriers in shared memory that count arrivals and bytes --===//
//
// A phase of a barrier ends when it has had all its arrivals and all bytes that they announced.
// Phases are distinguished by their parity: the first is 0, and a wait for the phase before the
// first returns at once. Barriers take 8 bytes each.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"
#include "ptx/bounded_wait.cuh"

__device__ __forceinline__ void init_mbarrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers known to copies; __syncthreads() makes them known to the block.
__device__ __forceinline__ void publish_mbarriers() {
  begin_counting_arrivals();
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives too; the phase also waits for so many bytes of copies.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity has ended: that is, for `what`.
__device__ __forceinline__ void wait_for_phase(u32 barrier, u32 parity,
                                               [[maybe_unused]] const char* what = "copies") {
  [[maybe_unused]] const WaitBound bound;
  u32 ended;
  do {
#ifdef SAGEBWD_BOUNDED_WAITS
    bound.check(what, "barrier in shared memory at byte", barrier - first_own_byte());
#endif
    asm volatile("{ .reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (ended == 0);
}
