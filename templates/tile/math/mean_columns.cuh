//===- tile/math/mean_columns.cuh - What this thread's columns of scores lack -----===//
#pragma once

#include "base.cuh"

/// Under SMOOTH_Q (tile/math/mean_scores.cuh): of columns 8j .. 8j + 7 this thread's two. 512 bytes
/// serve all rows of a block and 128 keys.
__device__ __forceinline__ float2 mean_columns(const float* mean_scores, int j) {
  return __ldg(reinterpret_cast<const float2*>(mean_scores + 8 * j + 2 * (lane_id() & 3)));
}
