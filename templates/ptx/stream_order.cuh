//===- ptx/stream_order.cuh - Programmatic dependent launch, from sm_90 on ---===//
//
// Kernels of a pass are launched so that each may begin while the one before it ends: its blocks
// take the multiprocessors that have nothing more to do. What it reads must be there, and what
// others still read must not be written over: so a kernel touches no memory of the device before it
// has waited for the whole of the one before it, which had waited for the one before that. Nothing
// less than this wait makes results visible. Older GPUs take kernels one after the other.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

/// How every kernel begins.
__device__ __forceinline__ void begin_in_stream_order() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
