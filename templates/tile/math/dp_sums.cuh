//===- tile/math/dp_sums.cuh - dP's sums are in FP32 -----------------------------===//
//
// Kernels that sum dP in FP16 have dp_sums16.cuh in the place of this file. The operands that these
// functions name are there alone.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"

constexpr bool DP16 = false;

template <typename P> __device__ __forceinline__ float* value_range(const P&) { return nullptr; }
template <typename P> __device__ __forceinline__ fp16* half_v(const P&) { return nullptr; }
template <typename P> __device__ __forceinline__ fp16* half_dout(const P&) { return nullptr; }
/// A copy of dO for dP, of which there is none unless SCALED_DOUT.
template <typename P> __device__ __forceinline__ const Element* dout_copy(const P& p) {
  return p.dout_rows;
}
template <typename P> __device__ __forceinline__ float* dp_factors(const P&) { return nullptr; }
