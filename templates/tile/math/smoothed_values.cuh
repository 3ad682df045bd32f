//===- tile/math/smoothed_values.cuh - V is quantised without its mean -------------===//
//
// Stands in the place of values_as_given.cuh. P below half a level is lost in P V, and not in the
// sum of its row. So O is too small by a part of the mean of V. With v the mean of a head's values
//   O = P (V - v) / sum(P) + v
// loses such a part of nearly nothing, and the scales of V are smaller (SageAttention2, arXiv
// 2411.10958, smooths V too, for FP22 sums). v is summed by kernels/key_mean in chunks, in FP32 and
// always in the same order. kernels/quantize adds them up, takes v off V's copy and writes it
// beside the scales, and the forward adds it to O. A channel whose mean is not finite has v = 0.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/copies.cuh"

constexpr bool SMOOTH_V = true;
constexpr int VALUE_VECTORS = CHANNEL_VECTORS + 1; ///< with the mean, the same of every scale block

template <typename P> __device__ __forceinline__ float* value_sums(const P& p) {
  return p.value_sums;
}
