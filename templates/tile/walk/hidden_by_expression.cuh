//===- tile/walk/hidden_by_expression.cuh - The queries that a mask hides from a key --===//
//
// Kernels with a mask have this file in the place of hidden_by_intervals.cuh.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "mask_expression.cuh"

struct MaskOfKey {
  const Sight& sight;
  int key;

  __device__ __forceinline__ bool hides_from(int query) const { return !sight.sees(query, key); }
};

struct MaskOfHead {
  Sight sight;

  __device__ __forceinline__ MaskOfHead(const Params& p, int batch, int head, int)
      : sight{p, batch, head} {}
  __device__ __forceinline__ MaskOfKey of(int key) const { return {sight, key}; }
};
