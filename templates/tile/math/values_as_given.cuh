//===- tile/math/values_as_given.cuh - No mean is taken off V ---------------------===//
//
// Kernels of specs with smooth_v have smoothed_values.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/copies.cuh"

constexpr bool SMOOTH_V = false;
constexpr int VALUE_VECTORS = CHANNEL_VECTORS; ///< of each scale block of V's copy

template <typename P> __device__ __forceinline__ float* value_sums(const P&) { return nullptr; }
