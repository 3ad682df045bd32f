//===- ptx/prefetch.cuh - Asking for what will be read -----------------------===//
#pragma once

#include "base.cuh"

/// Has the 128 bytes at an address on their way into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
