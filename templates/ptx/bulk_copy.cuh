//===- ptx/bulk_copy.cuh - Copies of many bytes that one thread starts, sm_90 --===//
//
// Addresses and sizes are multiples of 16 bytes. What arrives is known to wgmma without a fence.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

/// Starts copying from global to shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void bulk_copy(u32 destination, const void* source, u32 bytes,
                                          u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
               "[%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Starts copying a box of a 4-dimensional tensor, whose first element has these indices, innermost
/// first. What lies outside the tensor arrives as zeros, and counts.
__device__ __forceinline__ void tensor_copy(u32 destination, const TensorMap& map, int i0, int i1,
                                            int i2, int i3, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
               "l"(&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier)
               : "memory");
}

/// Starts adding FP32 values in shared memory, written before fence_async_proxy(), to global ones,
/// in whatever order.
__device__ __forceinline__ void bulk_add(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(source), "r"(bytes)
               : "memory");
}
/// This does the same for FP16 values, each sum rounded to nearest even; subnormal numbers count.
__device__ __forceinline__ void bulk_add(fp16* destination, u32 source, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(
          destination),
      "r"(source), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until at most `PENDING` of this thread's groups still read shared memory.
template <int PENDING> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
