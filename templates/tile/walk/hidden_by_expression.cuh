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

struct MaskOfHead {
  Sight sight;

  __device__ __forceinline__ MaskOfHead(const Params& p, int batch, int head, int)
      : sight{p, batch, head} {}
  /// From which queries, `first` and those behind it, a key is hidden.
  __device__ __forceinline__ u32 hidden_from(const Sequence& at, int key, int first) const {
    u32 found = 0;
#pragma unroll 4 // registers are short, and reads of tables shall overlap
    for (int i = 0; i < QUERIES_ASKED; ++i)
      if (hidden(at, first + i, key) || !sight.sees(first + i, key))
        found |= 1u << i;
    return found;
  }
};
