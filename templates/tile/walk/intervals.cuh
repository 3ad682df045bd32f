//===- tile/walk/intervals.cuh - The queries that intervals hide from a key -------===//
//
// A key has INTERVALS numbers that say which queries do not see it, beside the mask (FlashMask,
// arXiv 2410.01359, section 4):
//   with a causal mask   1: those from the number on;  2: those from the first to before the second
//   without              2: those from the first number on, and those before the second
//                        4: those from the first to before the second, and from the third to
//                           before the fourth
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"

static_assert(INTERVALS == 1 || INTERVALS == 2 || INTERVALS == 4, "a key has so many numbers");

constexpr int INTERVALS_A_KEY = INTERVALS == 4 || (INTERVALS == 2 && !CAUSAL) ? 2 : 1;

/// Queries begin .. end - 1 do not see the key. An end that no number says is that of all queries.
struct IntervalsOfKey {
  int begin[INTERVALS_A_KEY], end[INTERVALS_A_KEY];
};

/// This says where the numbers of the keys lie that a query head sees.
struct IntervalsOfHead {
  const int* first;

  /// Heads and sequences may share them: their stride is then 0.
  __device__ __forceinline__ IntervalsOfHead(const Params& p, int batch, int kv_head)
      : first(p.intervals + batch * p.interval_stride_b + kv_head * p.interval_stride_h) {}
  __device__ __forceinline__ IntervalsOfKey of(int key) const {
    constexpr int NO_END = 0x7fffffff, LAST = INTERVALS_A_KEY - 1;
    const int* at = first + static_cast<s64>(key) * INTERVALS;
    if constexpr (INTERVALS == 1)
      return {{__ldg(at)}, {NO_END}};
    IntervalsOfKey found;
    if constexpr (INTERVALS == 2) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(at));
      found.begin[LAST] = 0, found.end[LAST] = both.y;
      found.begin[0] = both.x, found.end[0] = CAUSAL ? static_cast<int>(both.y) : NO_END;
    } else {
      const uint4 all = __ldg(reinterpret_cast<const uint4*>(at));
      found.begin[0] = all.x, found.end[0] = all.y;
      found.begin[LAST] = all.z, found.end[LAST] = all.w;
    }
    return found;
  }
};
