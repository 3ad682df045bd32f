//===- tile/sla/mixture.cuh - The exact branch's share of a query's output ------===//
#pragma once

#include "tile/walk/place.cuh"

/// alpha of a row of the block that begins at query `first`; 0 for all where there is none.
__device__ __forceinline__ float alpha_of(const Params& p, const QueryHead& at, int first,
                                          int row) {
  const int query = first + row;
  if (p.alpha == nullptr || query >= p.seq_q)
    return 0;
  return __ldg(p.alpha + at.batch * p.alpha_stride_b + at.head * p.alpha_stride_h +
               query * p.alpha_stride_s);
}

/// The number of the block's sums among all heads' blocks, or of one for all blocks, which query
/// heads of a group then share.
__device__ __forceinline__ s64 sums_of(bool one, const QueryHead& at) {
  return one ? at.flat_kv_head : at.flat_head * gridDim.x + blockIdx.x;
}
