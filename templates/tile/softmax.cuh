//===- tile/softmax.cuh - What a row of the forward needs across groups -----===//
#pragma once

#include "configuration.cuh"
#include "ptx/math.cuh"
#include "tile/quantizer.cuh"

constexpr int COLUMNS8 = GROUP_KV / 8;

/// What one row needs across the groups. Maxima and scores are in units of log2.
struct RowState {
  float maximum = -INFINITY_F;
  float sum = 0; ///< of this thread's columns, times 255

  /// Takes in a group: scores of row g + 8r become P times 255, relative to the group's own
  /// maximum. `alpha` brings what was summed before to the new maximum, `beta` this group's P.
  __device__ __forceinline__ void softmax(float (&x)[COLUMNS8][4], int r, float score_scale,
                                          float& alpha, float& beta) {
    float largest = -INFINITY_F;
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j)
      largest = max_number(largest, max_number(x[j][2 * r], x[j][2 * r + 1]));
    largest = quad_max_number(largest) * score_scale;
    // Rows that have seen no key yet keep a maximum of -inf but never subtract it.
    const float new_maximum = max_number(maximum, largest);
    const float base = new_maximum == -INFINITY_F ? 0.0f : new_maximum;
    alpha = exp2_approx(maximum - base);
    beta = exp2_approx(largest - base);
    maximum = new_maximum;

    const float offset = (largest == -INFINITY_F ? 0.0f : largest) - LOG2_UNSIGNED_LEVELS;
    float group_sum = 0;
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        x[j][i] = exp2_approx(__fmaf_rn(x[j][i], score_scale, -offset));
        group_sum += x[j][i];
      }
    }
    sum = sum * alpha + group_sum * beta;
  }
};

/// O and what it was summed against move to a new maximum; most groups leave it where it is.
__device__ __forceinline__ void rescale(float (&o)[HEAD_DIM / 8][4], const float (&alpha)[2]) {
  if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        o[j][i] *= alpha[i >> 1];
    }
  }
}
