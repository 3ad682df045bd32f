//===- tile/group_walk.cuh - Groups of keys, those that need a mask first ----===//
#pragma once

#include "tile/visible.cuh"

/// The groups in the order in which they are taken: those that need a mask, which are the last ones
/// and the first, then the others. So each loop is one piece, and where one order ends the next
/// begins.
template <int GROUP> struct GroupWalk {
  int group, groups, left;
  int unmasked; ///< the last so many

  __device__ __forceinline__ GroupWalk(Range some_see, Range all_see)
      : groups(ceil_div(some_see.end, GROUP)), left(groups) {
    const int full = minimum(groups, all_see.end / GROUP);
    group = full == groups ? 0 : full;
    unmasked = maximum(0, full - SINK_KEYS);
  }
  __device__ __forceinline__ int next() const { return group + 1 == groups ? 0 : group + 1; }
  __device__ __forceinline__ int previous() const {
    return group > 0 ? group - 1 : maximum(groups - 1, 0);
  }
  __device__ __forceinline__ void advance() {
    group = next();
    --left;
  }
  /// How many were taken already.
  __device__ __forceinline__ int turn() const { return groups - left; }
  __device__ __forceinline__ bool needs_mask() const { return left > unmasked; }
};

/// Whether a group needs a mask: known while compiling, or not.
template <bool VALUE> struct Always { static constexpr bool value = VALUE; };
struct Sometimes {
  bool value;
};
