//===- tile/prepass/rotation.cuh - Hadamard transform along the head dimension -----===//
//
// Q K^T does not change when Q and K are multiplied by the same orthogonal matrix; a normalised
// Hadamard matrix spreads an outlier channel over all channels. By itself it would gather what all
// channels have in common in a single one: so channels take signs first, of a quadratic form that
// agrees with no row of the matrix, and any vector of one magnitude is spread as well. The sign of
// channel c is the parity of c0 c1 + c2 c5 + c3 c4 + c6 c7 by its bits. For head dims that are no
// power of two: blocks of the largest power of two that divides HEAD_DIM.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/prepass/token_share.cuh"

constexpr int HADAMARD_SIZE = HEAD_DIM & -HEAD_DIM;
constexpr float HADAMARD_NORM = HADAMARD_SIZE == 16    ? 0.25f
                                : HADAMARD_SIZE == 32  ? 0.176776695f
                                : HADAMARD_SIZE == 64  ? 0.125f
                                : HADAMARD_SIZE == 128 ? 0.0883883476f
                                : HADAMARD_SIZE == 256 ? 0.0625f
                                                       : 0.0441941738f;
static_assert(HADAMARD_NORM * HADAMARD_NORM * HADAMARD_SIZE > 0.999f &&
                  HADAMARD_NORM * HADAMARD_NORM * HADAMARD_SIZE < 1.001f,
              "1 / sqrt(HADAMARD_SIZE) of this width is not in the table");
static_assert(HADAMARD_SIZE >= 8 * LANES_A_TOKEN, "the lanes of a token are of one block");

/// A step of the transform between values of one thread.
template <int STRIDE> __device__ __forceinline__ void butterflies(float (&x)[SHARE]) {
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    if ((i & STRIDE) == 0) {
      const float a = x[i], b = x[i + STRIDE];
      x[i] = a + b;
      x[i + STRIDE] = a - b;
    }
  }
}

/// The bits of a channel that lie in a thread contribute this to its sign: 0 to 2 and 5 to 7 of it
/// are 0 to 5 of i (channel_of()). Bits 3 and 4 are the lane's.
__device__ __forceinline__ constexpr bool is_negated(int i) {
  return ((i & i >> 1) ^ (i & i >> 1) >> 2 ^ (i & i >> 1) >> 4) & 1;
}

/// Transforms a token that LANES_A_UNIT lanes share, or has of each half. Steps go from neighbours
/// to the farthest channels, of which the lanes come behind the first three: channel_of(). The
/// signs cost nothing: those within a thread are known as it is compiled; lane 3's, whose bits are
/// both set, is in the signs of the steps between lanes, behind which lane 0 alone holds the
/// negative.
__device__ __forceinline__ void hadamard(float (&x)[SHARE]) {
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    x[i] = is_negated(i) ? -x[i] : x[i];
  butterflies<1>(x);
  butterflies<2>(x);
  butterflies<4>(x);
  static_assert(LANES_A_UNIT == 4);
  const int lane = lane_id() % LANES_A_UNIT;
#pragma unroll
  for (int stride = 1; stride < LANES_A_UNIT; stride *= 2) {
    const bool outer = lane == 0 || lane == 3;
    const float sign = outer == (stride == 1) ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], stride));
  }
  if constexpr (HADAMARD_SIZE / LANES_A_TOKEN >= 16)
    butterflies<8>(x);
  if constexpr (HADAMARD_SIZE / LANES_A_TOKEN >= 32)
    butterflies<16>(x);
  if constexpr (HADAMARD_SIZE / LANES_A_TOKEN >= 64)
    butterflies<32>(x);
  if constexpr (LANES_A_TOKEN > LANES_A_UNIT) {
    const float sign = lane_id() % LANES_A_TOKEN < LANES_A_UNIT ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], LANES_A_UNIT));
  }
  const float norm = lane == 0 ? -HADAMARD_NORM : HADAMARD_NORM;
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    x[i] *= norm;
}
