//===- tile/walk/roles.cuh - How warp-specialised kernels begin, sm_90a ---------------===//
//
// The first warps of a block consume what one thread of the others produces. All six such kernels
// begin alike: barriers exist, and what all threads write to shared memory is written, before any
// thread waits for a barrier or reads it; then registers go from producers to consumers.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stream_order.cuh"
#include "ptx/warp_roles.cuh"

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

/// One thread calls init_barriers(), all threads call write(). Then the first CONSUMING_WARPS warps
/// call consume(), the first thread behind them produce(), and the others behind them assist().
template <int CONSUMING_WARPS, typename InitBarriers, typename Write, typename Produce,
          typename Consume, typename Assist = Nothing>
__device__ __forceinline__ void run_roles(const InitBarriers& init_barriers, const Write& write,
                                          const Produce& produce, const Consume& consume,
                                          const Assist& assist = {}) {
  if (threadIdx.x == 0) {
    init_barriers();
    publish_mbarriers();
  }
  write();
  begin_in_stream_order();
  __syncthreads();
  if (warp_id() >= CONSUMING_WARPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMING_WARPS * 32)
      produce();
    else
      assist();
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume();
  }
}
