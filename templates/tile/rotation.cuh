//===- tile/rotation.cuh - Hadamard transform along the head dimension -----===//
//
// Q K^T does not change when Q and K are multiplied by the same orthogonal matrix; a normalised
// Hadamard matrix spreads an outlier channel over all channels. For head dims that are no power of
// two: blocks of the largest power of two that divides HEAD_DIM.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"

constexpr int HADAMARD_SIZE = HEAD_DIM & -HEAD_DIM;
constexpr float HADAMARD_NORM = HADAMARD_SIZE == 16    ? 0.25f
                                : HADAMARD_SIZE == 32  ? 0.17677670f
                                : HADAMARD_SIZE == 64  ? 0.125f
                                : HADAMARD_SIZE == 128 ? 0.08838835f
                                                       : 0.0625f;

/// Transforms a token whose channels 8l..8l+7 lie in x of lane l of its group of HEAD_DIM / 8.
__device__ __forceinline__ void hadamard(float (&x)[8]) {
#pragma unroll
  for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & stride) == 0) {
        const float a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
    }
  }
#pragma unroll
  for (int stride = 1; stride < HADAMARD_SIZE / 8; stride *= 2) {
    const bool upper = (threadIdx.x & stride) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], stride);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    x[i] *= HADAMARD_NORM;
}
