//===- tile/math/plain_score.cuh - Scores stay what they are ----------------------===//
//
// Kernels with a score function have given_score.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"

constexpr bool HAS_SCORE = false;

struct Score {
  static constexpr float GIVEN = 1;
  const Params& p;
  int b, h;
  __device__ __forceinline__ float exponent(int, int, float s) const { return s; }
  __device__ __forceinline__ float slope(int, int, float) const { return 1; }
};
