//===- tile/math/extremes.cuh - The least and the greatest int of a warp ----------===//
#pragma once

#include "base.cuh"

constexpr int LEAST_INT = -0x7fffffff - 1, GREATEST_INT = 0x7fffffff;

__device__ __forceinline__ int least_of_warp(int x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2)
    x = minimum(x, __shfl_xor_sync(~0u, x, by));
  return x;
}
__device__ __forceinline__ int greatest_of_warp(int x) { return ~least_of_warp(~x); }
