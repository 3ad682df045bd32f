//===- tile/work/turns.cuh - Warpgroups take turns --------------------------------===//
//
// Warpgroups that do the same run in step and wait for the same units of the SM together. Turns
// part them: each waits at a named barrier of its own until the one before it, round and round, has
// passed its turn. The barrier counts both, so that nobody is passed twice.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/special.cuh"
#include "ptx/warp_roles.cuh"

/// Of the block's first WARPGROUPS. Barriers FIRST .. FIRST + WARPGROUPS - 1 are theirs.
template <int WARPGROUPS, int FIRST> struct Turns {
  int own = threadIdx.x / 128;

  /// Before the first turn: the first one's is given by the last.
  __device__ __forceinline__ void begin() const {
    if (own == WARPGROUPS - 1)
      pass();
  }
  __device__ __forceinline__ void take() const {
    if constexpr (WARPGROUPS > 1)
      named_barrier_sync<256>(FIRST + own);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (WARPGROUPS > 1) {
      const int next = anew(own) + 1;
      named_barrier_arrive<256>(FIRST + (next == WARPGROUPS ? 0 : next));
    }
  }
};
