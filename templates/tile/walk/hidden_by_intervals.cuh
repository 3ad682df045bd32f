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

/// COUNT queries from `first` on.
template <int COUNT> struct QueriesFrom { int first; };

struct MaskOfHead {
  IntervalsOfHead intervals;

  __device__ __forceinline__ MaskOfHead(const Params& p, int batch, int, int kv_head)
      : intervals(p, batch, kv_head) {}
  template <int COUNT>
  __device__ __forceinline__ QueriesFrom<COUNT> queries_from(int first_query) const {
    return {first_query};
  }
  /// From which of the QUERIES_ASKED queries from `from` on, of those given, a key is hidden.
  template <int COUNT>
  __device__ __forceinline__ u32 hidden_from(const Sequence& at, int key,
                                             const QueriesFrom<COUNT>& queries, int from) const {
    const int first = queries.first + from;
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
