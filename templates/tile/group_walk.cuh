//===- tile/group_walk.cuh - Groups of keys, those that need a mask first ----===//
#pragma once

#include "tile/visible.cuh"

/// The groups in the order in which they are taken: those that need a mask, which are the last ones
/// and the first, then the others. So each loop is one piece, and where one order ends the next
/// begins.
template <int GROUP> struct GroupWalk {
  int group, groups, left;
  int unmasked; ///< the last so many

  __device__ __forceinline__ GroupWalk(const Sequence& at, Range queries) {
    const Range all = tiles_of<GROUP>(keys_of(at, queries));
    const Range full = unmasked_tiles_of<GROUP>(at, queries);
    groups = all.end, begin_ = all.begin;
    const int full_end = minimum(groups, maximum(begin(), full.end));
    left = groups - begin();
    group = full_end == groups ? begin() : full_end;
    unmasked = maximum(0, full_end - full.begin);
  }
  /// The first of them in the sequence.
  __device__ __forceinline__ int begin() const { return WINDOW ? begin_ : 0; }
  __device__ __forceinline__ int next() const { return group + 1 == groups ? begin() : group + 1; }
  __device__ __forceinline__ int previous() const {
    return group > begin() ? group - 1 : maximum(groups - 1, begin());
  }
  /// Whether this is the first of a unit of so many groups, or follows on the last one of all.
  __device__ __forceinline__ bool begins_unit(int groups_a_unit) const {
    return group % groups_a_unit == 0 || (WINDOW && group == begin_);
  }
  __device__ __forceinline__ void advance() {
    group = next();
    --left;
  }
  /// How many were taken already.
  __device__ __forceinline__ int turn() const { return groups - begin() - left; }
  __device__ __forceinline__ bool needs_mask() const { return left > unmasked; }

private:
  int begin_;
};

/// Whether a group needs a mask: known while compiling, or not.
template <bool VALUE> struct Always { static constexpr bool value = VALUE; };
struct Sometimes {
  bool value;
};
