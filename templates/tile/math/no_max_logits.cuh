//===- tile/math/no_max_logits.cuh - Largest scores are not kept ------------------===//
//
// Kernels that give the largest score of each head have max_logits.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/rise.cuh"
#include "tile/walk/visible.cuh"

constexpr bool MAX_LOGITS = false;
constexpr int MAX_LOGITS_BYTES = 0;

struct MaxLogit {
  static __device__ __forceinline__ void clear() {}
  __device__ __forceinline__ bool asks(const float (&rise)[2]) const {
    return rise[0] > RISE || rise[1] > RISE;
  }
  template <typename... What> __device__ __forceinline__ void begin(const What&...) {}
  template <typename... What> __device__ __forceinline__ void take(const What&...) {}
  __device__ __forceinline__ void end(const QueryHead&, bool) const {}
};
