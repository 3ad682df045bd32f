//===- tile/math/pair_softmax.cuh - P of a step, by two warpgroups ------------------===//
//
// As tile/math/softmax.cuh, by a pair (tile/walk/pair.cuh) that owns the same 64 queries. Each
// forms P of a group of 64 keys of its own, relative to the group's maximum. The reference of a
// query, which O is relative to, follows the maxima of both groups, which the warpgroups exchange.
// Each keeps the sum of its P.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/math.cuh"
#include "tile/math/products.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/visible.cuh"

constexpr int COLUMNS8 = TOKENS_PER_TILE / 8;
constexpr float RISE = 16.0f; ///< in units of log2, as in tile/math/softmax.cuh

struct PairSoftmax {
  static constexpr int LOWEST = -(1 << 30); ///< below every score
  float score_scale[2];                     ///< of a row's scores, in log2 units
  float reference[2] = {-INFINITY_F, -INFINITY_F};
  float sum[2] = {0, 0}; ///< of this thread's columns, times 255

  /// Lowers hidden scores, and gives the group's maxima in log2 units: -inf where none is seen.
  template <typename Hidden>
  __device__ __forceinline__ void find_maxima(float (&largest)[2], int (&s)[COLUMNS8][4],
                                              float2 key_scales, const Hidden& hidden) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float found = -INFINITY_F;
#pragma unroll
      for (int u = 0; u < 2; ++u) { // keys with one scale
        int top = LOWEST;
#pragma unroll
        for (int j = 4 * u; j < 4 * u + 4; ++j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (Hidden::ANY && hidden(r, j, half))
              s[j][2 * r + half] = LOWEST;
            top = maximum(top, s[j][2 * r + half]);
          }
        }
        const float scaled = static_cast<float>(top) * (u ? key_scales.y : key_scales.x);
        if (!Hidden::ANY || top != LOWEST)
          found = max_number(found, scaled);
      }
      found = quad_max_number(found);
      if (found != -INFINITY_F) {
        found *= score_scale[r];
        found = __fmaf_rn(fabsf(found), 0x1p-22f, found); // no P may round to 256
      }
      largest[r] = found;
    }
  }
  /// Moves the references where one of both groups' maxima is far above, and gives what rows of O
  /// are then multiplied with. Whether any moves, all threads of a warp are told.
  __device__ __forceinline__ bool raise(float (&alpha)[2], const float (&own)[2],
                                        const float (&others)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = max_number(own[r], others[r]);
      const bool moves = largest - reference[r] > RISE; // not where both are -inf
      alpha[r] = moves ? exp2_approx(reference[r] - largest) : 1.0f;
      reference[r] = moves ? largest : reference[r];
    }
    return __any_sync(~0u, alpha[0] != 1 || alpha[1] != 1);
  }
  /// What a group's products are multiplied with; 0 if no key of it is seen.
  __device__ __forceinline__ float beta(int r, float largest) const {
    return largest == -INFINITY_F ? 0.0f : exp2_approx(largest - reference[r]);
  }
  /// Forms P in 8 bits, 0 where hidden.
  template <bool HIDES>
  __device__ __forceinline__ void quantize_p(u32 (&p8)[2][4], const int (&s)[COLUMNS8][4],
                                             float2 key_scales, const float (&largest)[2],
                                             const float (&alpha)[2]) {
    float group_sum[2] = {0, 0};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      float p[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i >> 1, score = s[4 * u + j][i];
          const float scale = (u ? key_scales.y : key_scales.x) * score_scale[r];
          p[j][i] = exp2_approx(
              __fmaf_rn(static_cast<float>(score), scale, LOG2_UNSIGNED_LEVELS - largest[r]));
          if (HIDES && score == LOWEST)
            p[j][i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        group_sum[i >> 1] += ((p[0][i] + p[0][i + 1]) + (p[1][i] + p[1][i + 1])) +
                             ((p[2][i] + p[2][i + 1]) + (p[3][i] + p[3][i + 1]));
      quantize_fragment<false>(p8[u], p, 1.0f, 1.0f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum[r] = __fmaf_rn(group_sum[r], beta(r, largest[r]), sum[r] * alpha[r]);
  }
};
