//===- tile/walk/visible.cuh - Which keys a query sees ---------------------------===//
//
// A query sees the keys that the mask leaves. Kernels for lists of blocks have lists.cuh in the
// place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/hidden.cuh"

/// The sum of a query's P. Only with lists it may be unknown what the query sees.
__device__ __forceinline__ float known_sum(float sum, const Sequence&, int) { return sum; }
/// Whether a query sees no key, whose P have this sum; the same in the backward, where shift()
/// reads its ROW_SHIFT.
__device__ __forceinline__ bool sees_nothing(const Sequence& at, int query, float) {
  return sees_nothing(at, query);
}
template <typename Shift>
__device__ __forceinline__ bool saw_nothing(const Sequence& at, int query, const Shift&) {
  return sees_nothing(at, query);
}
constexpr bool HIDES_SCORES = HAS_MASK;
/// Whether some key of a block is hidden from a query of a block: of those of these two, and of a
/// query head.
__device__ __forceinline__ bool hides_part(const Sequence&, int, int, int) { return false; }
/// Whether any of these keys is hidden from any of these queries, of a query head.
__device__ __forceinline__ bool any_hidden(const KeyHead& at, int, Range queries, Range keys) {
  return needs_mask(at, queries, keys);
}
