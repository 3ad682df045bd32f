//===- tile/walk/hidden_by_expression.cuh - The queries that a mask hides from a key --===//
//
// Kernels with a mask have this file in the place of hidden_by_intervals.cuh.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "mask_expression.cuh"
#include "tile/walk/mask.cuh"

/// So many queries of a key are asked about at a time, a bit for each.
constexpr int QUERIES_ASKED = 16;

/// Queries from `first` on, COUNT of them: what the mask reads of each. A lane reads that of one,
/// or of two, for the warp.
template <int COUNT> struct QueriesFrom {
  static constexpr int EACH = COUNT == 64 ? 2 : 1;
  static_assert(COUNT == 64 || COUNT == QUERIES_ASKED, "a lane has one or two");
  int first;
  int reads[EACH][Sight::READS];

  __device__ __forceinline__ QueriesFrom(const Sight& sight, int first_query) : first(first_query) {
    if constexpr (Sight::QUERY_READS > 0)
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        sight.read_query(reads[i], first + lane_id() % (COUNT / EACH) * EACH + i);
  }
  /// What lane `lane` has of its query i.
  __device__ __forceinline__ void read(int (&of)[Sight::READS], int lane, int i) const {
#pragma unroll
    for (int n = 0; n < Sight::QUERY_READS; ++n)
      of[n] = __shfl_sync(~0u, reads[i][n], lane);
  }
};

struct MaskOfHead {
  Sight sight;

  __device__ __forceinline__ MaskOfHead(const Params& p, int batch, int head, int)
      : sight{p, batch, head} {}
  template <int COUNT>
  __device__ __forceinline__ QueriesFrom<COUNT> queries_from(int first_query) const {
    return {sight, first_query};
  }
  /// From which of the QUERIES_ASKED queries from `from` on, of those given, a key is hidden.
  template <int COUNT>
  __device__ __forceinline__ u32 hidden_from(const Sequence& at, int key,
                                             const QueriesFrom<COUNT>& queries, int from) const {
    constexpr int EACH = QueriesFrom<COUNT>::EACH;
    u32 found = 0;
#pragma unroll 4 // registers are short, and reads of tables shall overlap
    for (int i = 0; i < QUERIES_ASKED; i += EACH) {
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        const int query = queries.first + from + i + n;
        int of[Sight::READS];
        queries.read(of, (from + i) / EACH, n);
        const bool seen = sight.sees(of, query, key); // asked in any case: no branch, no wait
        found |= static_cast<u32>(hidden(at, query, key) | !seen) << (i + n);
      }
    }
    return found;
  }
};
