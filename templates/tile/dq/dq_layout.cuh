//===- tile/dq/dq_layout.cuh - Where sums of dQ lie in memory ------------------===//
//
// dq_sum[head][16 queries][n8 tile of channels] holds a warp's accumulators as they are, so that a
// reduction writes whole lines: lane after lane where one instruction adds four floats (sm_90 and
// later), else accumulator after accumulator.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "base.cuh"

constexpr int DQ_ROWS = 16; ///< queries of one warp's sums
constexpr bool ADDS_FOURS = __CUDA_ARCH__ >= 900;

/// This lane's accumulators of an n8 tile lie here, one behind the other at a distance of
/// DQ_STRIDE.
constexpr int DQ_STRIDE = ADDS_FOURS ? 1 : 32;
__device__ __forceinline__ int dq_place(int n8) {
  return n8 * (DQ_ROWS * 8) + lane_id() * (ADDS_FOURS ? 4 : 1);
}
