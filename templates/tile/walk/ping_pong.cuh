//===- tile/walk/ping_pong.cuh - Warpgroups alternate at the tensor cores ---===//
//
// Warpgroups that do the same run in step and wait for the same units of the SM together. Ping-pong
// parts them: each waits at a named barrier of its own until the one before it, round and round,
// has signalled. The barrier counts both, so that nobody is signalled twice.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/special.cuh"
#include "ptx/warp_roles.cuh"

/// The block's first WARPGROUPS take part. Barriers FIRST .. FIRST + WARPGROUPS - 1 are theirs.
template <int WARPGROUPS, int FIRST> struct PingPong {
  int own = threadIdx.x / 128;

  /// Lets the first warpgroup begin: the last one signals to it.
  __device__ __forceinline__ void begin() const {
    if (own == WARPGROUPS - 1)
      signal();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (WARPGROUPS > 1)
      named_barrier_sync<256>(FIRST + own);
  }
  __device__ __forceinline__ void signal() const {
    if constexpr (WARPGROUPS > 1) {
      const int next = opaque(own) + 1;
      named_barrier_arrive<256>(FIRST + (next == WARPGROUPS ? 0 : next));
    }
  }
};
