//===- tile/math/dp_sums16.cuh - dP's sums are in FP16 -----------------------------===//
//
// Stands in the place of dp_sums.cuh. Some GPUs sum 16-bit products in FP16 at twice the rate. Then
//   dP - delta = dO (V - v) - (delta - dO v)
// is formed so, for any vector v. With v the mean of a head's values, sums do not lose in a common
// part of V what they have to tell. Operands are FP16:
//   V'  = (V - v) 2^a    a for a key/value head, so that magnitudes are below 2^9
//   dO' = dO 2^b         b for a query, so that magnitudes are below 2^-4
// so that sums of 256 products are below 2^13, and cannot overflow. Each instruction adds 16
// products (ptx/mma.cuh). Behind it one FFMA a score makes dP - delta of a sum, by the factor
// 2^-(a + b) of its query and minus delta - dO v, which stands in the place of minus delta. The
// powers are exact, and so are bf16 values times them, as far as FP16 has their magnitudes: 2^-24
// is its least.
//
// v is summed in FP32, always in the same order: by kernels/key_mean in chunks, beside the largest
// value of V's and -V's channels, from which kernels/quantize adds it up and finds a. A channel
// whose mean is not finite has v = 0. If a value of V is not finite, 2^-a is NaN, and with it
// every gradient of the head; if one of dO, 2^-b of its query.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"

constexpr bool DP16 = true;

template <typename P> __device__ __forceinline__ float* value_range(const P& p) {
  return p.value_range;
}
template <typename P> __device__ __forceinline__ fp16* half_v(const P& p) { return p.half_v; }
template <typename P> __device__ __forceinline__ fp16* half_dout(const P& p) { return p.half_dout; }
template <typename P> __device__ __forceinline__ const fp16* dout_copy(const P& p) {
  return p.half_dout;
}
template <typename P> __device__ __forceinline__ float* dp_factors(const P& p) {
  return p.dp_factor;
}
