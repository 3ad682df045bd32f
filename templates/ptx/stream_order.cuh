//===- ptx/stream_order.cuh - Programmatic dependent launch, from sm_90 on ---===//
//
// Kernels of a pass are launched so that each may begin while the one before it ends: its blocks
// take the multiprocessors that have nothing more to do. What it reads must be there, and what
// others still read must not be written over, so each kernel waits for the one before it and lets
// the next one begin only then: whoever begins knows that all but the one before it are done.
// Older GPUs take kernels one after the other.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

/// Waits for the whole of the kernel before this one, whose results are visible then.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// How a kernel begins.
__device__ __forceinline__ void begin_in_stream_order() {
  wait_for_kernel_before();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
