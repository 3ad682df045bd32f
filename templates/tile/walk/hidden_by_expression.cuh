//===- tile/walk/hidden_by_expression.cuh - The queries that a mask hides from a key --===//
//
// Kernels with a mask have this file in the place of hidden_by_intervals.cuh.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "mask_expression.cuh"

struct MaskOfKey {
  const Params& p;
  int batch, head, key;

  __device__ __forceinline__ bool hides_from(int query) const {
    return !sees(p, batch, head, query, key);
  }
};

struct MaskOfHead {
  const Params& p;
  int batch, head;

  __device__ __forceinline__ MaskOfHead(const Params& p, int batch, int head, int)
      : p(p), batch(batch), head(head) {}
  __device__ __forceinline__ MaskOfKey of(int key) const { return {p, batch, head, key}; }
};
