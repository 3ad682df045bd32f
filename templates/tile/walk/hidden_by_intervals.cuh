//===- tile/walk/hidden_by_intervals.cuh - The queries from which a key is hidden -===//
//
// They are those that the mask hides it from, and those in its intervals.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/intervals.cuh"
#include "tile/walk/mask.cuh"

/// So many queries of a key are asked about at a time, a bit for each.
constexpr int QUERIES_ASKED = 16;
/// Those of them, from `first` on, that lie before a query.
__device__ __forceinline__ u32 bits_before(int query, int first) {
  return ~(~0u << minimum(maximum(maximum(query, 0) - first, 0), QUERIES_ASKED));
}

struct MaskOfHead {
  IntervalsOfHead intervals;

  __device__ __forceinline__ MaskOfHead(const Params& p, int batch, int, int kv_head)
      : intervals(p, batch, kv_head) {}
  /// From which queries, `first` and those behind it, a key is hidden.
  __device__ __forceinline__ u32 hidden_from(const Sequence& at, int key, int first) const {
    constexpr u32 ALL = (1u << QUERIES_ASKED) - 1;
    if (key >= at.seq_kv())
      return ALL;
    const Range seen = queries_of(at, tokens_from(key, 1));
    u32 hidden = bits_before(seen.begin, first);
    if constexpr (WINDOW)
      hidden |= ~bits_before(seen.end, first) & ALL;
    const IntervalsOfKey of_key = intervals.of(key);
#pragma unroll
    for (int i = 0; i < INTERVALS_A_KEY; ++i)
      hidden |= bits_before(of_key.end[i], first) & ~bits_before(of_key.begin[i], first);
    return hidden;
  }
};
