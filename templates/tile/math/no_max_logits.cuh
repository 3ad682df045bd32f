//===- tile/math/no_max_logits.cuh - Largest scores are not kept ------------------===//
//
// Kernels that give the largest score of each head have max_logits.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/visible.cuh"

constexpr bool MAX_LOGITS = false;

struct MaxLogit {
  __device__ __forceinline__ void start_from(int, float) {}
  __device__ __forceinline__ void take(const float (&)[2]) {}
  __device__ __forceinline__ void end(const QueryHead&, int, const bool (&)[2], bool) const {}
};
