//===- tile/prepass/whole_dout.cuh - All of dO is exact attention's --------------===//
//
// Kernels of calls with linear attention have shared_dout.cuh in the place of this file, which says
// what these functions do there.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/prepass/scale_block.cuh"

__device__ __forceinline__ void find_exact_shares(const Params&, const QueryHead&,
                                                  const ScaleBlock&) {}
__device__ __forceinline__ const Share& exact_share(const Share& share, int) { return share; }
__device__ __forceinline__ void take_exact_shares(float (&)[4][8], int) {}
__device__ __forceinline__ void write_exact_share(const Params&, const QueryHead&, int,
                                                  const Share&) {}
__device__ __forceinline__ float magnitude_of_head(const Params&, const Source& sample) {
  return magnitude_of(sample);
}
