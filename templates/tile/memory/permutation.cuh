//===- tile/memory/permutation.cuh - Accumulators as the next product's A operand ---===//
//
// A thread's accumulators of columns 8j+2t, 8j+2t+1 of four n8 tiles (j = 0..3) become the bytes
// of one A fragment (k = 32) without any exchange between lanes, if the summed index of the other
// operand is stored in the order `sigma`: within each 16 tokens, slots 4t..4t+3 hold tokens 2t,
// 2t+1, 2t+8, 2t+9. Every transposed copy is written in that order (kernels/quantize.cuh).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/convert.cuh"

/// Four values, a and b times `low_inverse`, the others times `high_inverse`, rounded to nearest
/// even and packed into bytes, the first lowest, for values that stay within the bytes' range. NaN
/// becomes some byte.
template <bool SIGNED>
__device__ __forceinline__ u32 pack_scaled(float a, float b, float c, float d, float low_inverse,
                                           float high_inverse) {
#if __CUDA_ARCH__ == 800
  // There the conversion is a sixteenth of an FFMA's rate: the sum with 1.5 * 2^23 rounds instead,
  // and its lowest byte is the integer's.
  const u32 low = __byte_perm(__float_as_uint(__fmaf_rn(a, low_inverse, MAGIC)),
                              __float_as_uint(__fmaf_rn(b, low_inverse, MAGIC)), 0x0040);
  const u32 high = __byte_perm(__float_as_uint(__fmaf_rn(c, high_inverse, MAGIC)),
                               __float_as_uint(__fmaf_rn(d, high_inverse, MAGIC)), 0x0040);
  return __byte_perm(low, high, 0x5410);
#else
  if constexpr (SIGNED)
    return pack_s8(a * low_inverse, b * low_inverse, c * high_inverse, d * high_inverse);
  else
    return pack_u8(a * low_inverse, b * low_inverse, c * high_inverse, d * high_inverse);
#endif
}
template <bool SIGNED>
__device__ __forceinline__ u32 pack_scaled(float a, float b, float c, float d, float inverse) {
  return pack_scaled<SIGNED>(a, b, c, d, inverse, inverse);
}

/// Tokens of a quad, four tokens whose bytes form one word: first, first+1, first+8, first+9.
__device__ __forceinline__ int first_token_of_quad(int quad) {
  return (quad >> 2) * 16 + (quad & 3) * 2;
}
__device__ __forceinline__ int token_of_quad(int quad, int i) {
  return first_token_of_quad(quad) + (i & 1) + (i >> 1) * 8;
}

/// The slot of a token, or of a channel, in the order sigma.
__device__ __forceinline__ int sigma_slot(int index) {
  return (index & ~15) | (index >> 1 & 3) << 2 | (index >> 3 & 1) << 1 | (index & 1);
}

/// The A fragment of 32 summed tokens from accumulators x[0..3] of their n8 tiles, rows scaled by
/// `inverse_low` (row g) and `inverse_high` (row g + 8).
template <bool SIGNED>
__device__ __forceinline__ void quantize_fragment(u32 (&a)[4], const float (*x)[4],
                                                  float inverse_low, float inverse_high) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* even = x[2 * half];
    const float* odd = x[2 * half + 1];
    a[2 * half] = pack_scaled<SIGNED>(even[0], even[1], odd[0], odd[1], inverse_low);
    a[2 * half + 1] = pack_scaled<SIGNED>(even[2], even[3], odd[2], odd[3], inverse_high);
  }
}
/// Does so for COUNT fragments, one after the other.
template <bool SIGNED, int COUNT>
__device__ __forceinline__ void quantize_fragments(u32 (*a)[4], const float (*x)[4],
                                                   float inverse_low, float inverse_high) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    quantize_fragment<SIGNED>(a[k], &x[4 * k], inverse_low, inverse_high);
}

/// The A fragments of 16 summed tokens each in 16 bits: accumulators are in that order as they are.
template <int COUNT>
__device__ __forceinline__ void pack_fragments(u32 (*a)[4], const float (*x)[4]) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    a[k][0] = pack<Element>(x[2 * k][0], x[2 * k][1]);
    a[k][1] = pack<Element>(x[2 * k][2], x[2 * k][3]);
    a[k][2] = pack<Element>(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[k][3] = pack<Element>(x[2 * k + 1][2], x[2 * k + 1][3]);
  }
}
