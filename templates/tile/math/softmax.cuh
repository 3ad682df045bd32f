//===- tile/math/softmax.cuh - Scores of a group become P, group after group -----===//
//
// A score is an integer times the scale of 8 keys, all of one thread, times its row's scale. So
// maxima are those of integers, and one FFMA makes a score the exponent of its P. Those of smoothed
// queries lack their mean's (SMOOTH_Q): with it they are floats, in log2 units.
//
// P is exact for each row and group: relative to the group's own maximum, 255 at that one. What
// was summed before stays relative to a reference, which moves only where a group's maximum
// exceeds it by RISE: `beta`, which brings a group's P to the reference, may be so much above 1.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/math.cuh"
#include "tile/math/mean_columns.cuh"
#include "tile/math/no_max_logits.cuh"
#include "tile/math/plain_score.cuh"
#include "tile/math/products.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/walk/visible.cuh"

constexpr int COLUMNS8 = GROUP_KV / 8;
/// Scales of K that meet a thread's columns of a group. Under qk16 they are 1.
constexpr int KEY_SCALES = GROUP_KV / 32;

/// As rows have them.
using RowScores = ScoresOf<QK16 || SMOOTH_Q || HAS_SCORE>::type;

/// In units of log2. FP32 sums of 2^16 times what they were meant for are as exact.
constexpr float RISE = 16.0f;

/// This thread's scales of the group that begins at padded key `first` of the batch's.
__device__ __forceinline__ void read_key_scales(float (&scale)[KEY_SCALES], const Params& p,
                                                s64 first) {
  static_assert(KEY_SCALES == 2 || KEY_SCALES == 4, "groups of 64 or 128 keys");
  if constexpr (QK16) {
#pragma unroll
    for (int u = 0; u < KEY_SCALES; ++u)
      scale[u] = 1.0f;
  } else {
    // Those of 128 keys lie together; half of each lane's are of a group of 64.
    const int key = 2 * (lane_id() & 3) + (KEY_SCALES == 4 ? 0 : static_cast<int>(first) & 64);
    const float* from = p.k8_scale + ((first >> 7) * (128 / KEYS_A_SCALE) + key_scale_place(key));
    if constexpr (KEY_SCALES == 4) {
      const float4 all = __ldg(reinterpret_cast<const float4*>(from));
      scale[0] = all.x, scale[1] = all.y, scale[2] = all.z, scale[3] = all.w;
    } else {
      const float2 both = __ldg(reinterpret_cast<const float2*>(from));
      scale[0] = both.x, scale[1] = both.y;
    }
  }
}

/// Reads them from shared memory, where `scales` holds those of the 128 keys that a group is of.
__device__ __forceinline__ void read_key_scales(float (&scale)[KEY_SCALES], u32 scales, int group) {
  const u32 own = scales + (lane_id() & 3) * 16;
  if constexpr (KEY_SCALES == 4) {
    const float4 all = read_float4(own);
    scale[0] = all.x, scale[1] = all.y, scale[2] = all.z, scale[3] = all.w;
  } else {
    const float2 both = read_float2(own + group % 2 * 8);
    scale[0] = both.x, scale[1] = both.y;
  }
}

/// A thread's rows g and g + 8 need this across groups. Maxima are in units of log2.
struct SoftmaxRows {
  float score_scale[2]; ///< of a row's scores, in log2 units
  float reference[2] = {-INFINITY_F, -INFINITY_F};
  float sum[2] = {0, 0};        ///< of this thread's columns, times 255
  float subtracted[2] = {0, 0}; ///< BENDS_SCORES: by K-smoothing, from the row's scores
  MaxLogit max_logit;

  /// Row g + 8r starts from key 0, whose score is not finite where NaN: so is the sum, also of a
  /// query that sees no other key.
  __device__ __forceinline__ void start_from(int r, float score_of_sink) {
    reference[r] = score_of_sink;
    max_logit.start_from(r, score_of_sink);
    sum[r] = (lane_id() & 3) == 0 ? UNSIGNED_LEVELS + (score_of_sink - score_of_sink) : 0;
  }

  /// The scores as rows have them: in `x`, with those of the queries' mean or by the score
  /// function, or as they are. The group begins at a key; the block's queries at another place.
  __device__ __forceinline__ auto& complete(Scores::Sum (&s)[COLUMNS8][4], float (&x)[COLUMNS8][4],
                                            float (&key_scale)[KEY_SCALES],
                                            const float* mean_scores, const QueryHead& at,
                                            int first_query, int first_key) const {
    if constexpr (HAS_SCORE) {
      const Score score = {at.p, at.sequence(), at.head};
      const int thread = reread_thread();
      const int query = first_query + thread / 32 * 16 + (thread & 31) / 4;
#pragma unroll
      for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i >> 1, key = first_key + 8 * j + 2 * (thread & 3) + (i & 1);
          const float scale = key_scale[j / 4] * (score_scale[r] * Score::GIVEN);
          const float from = BENDS_SCORES ? subtracted[r] * Score::GIVEN : 0.0f;
          const float scaled =
              __fmaf_rn(Scores::value(s[j][i]), scale, __fmaf_rn(-Scores::ZERO, scale, from));
          x[j][i] = score.exponent(query + 8 * r, key, scaled);
        }
      }
#pragma unroll
      for (float& scale : key_scale)
        scale = 1;
      return x;
    } else if constexpr (!SMOOTH_Q) {
      return s;
    } else {
#pragma unroll
      for (int j = 0; j < COLUMNS8; ++j) {
        const float2 of_mean = mean_columns(mean_scores, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float scale = key_scale[j / 4] * score_scale[i >> 1];
          x[j][i] = __fmaf_rn(Scores::value(s[j][i]), scale,
                              __fmaf_rn(-Scores::ZERO, scale, i & 1 ? of_mean.y : of_mean.x));
        }
      }
#pragma unroll
      for (float& scale : key_scale)
        scale = 1;
      return x;
    }
  }

  /// Finds the group's maxima over what is not hidden, and lowers hidden scores in place. The
  /// reference moves where a maximum is far above it, and with it O and the row sums are rescaled.
  /// ROUNDED: see group_maximum().
  template <bool ROUNDED = false, typename Hidden>
  __device__ __forceinline__ void update_row_max(float (&largest)[2], float (&beta)[2], Sums& sums,
                                                 RowScores::Sum (&s)[COLUMNS8][4],
                                                 const float (&key_scale)[KEY_SCALES],
                                                 const Hidden& hidden) {
    if constexpr (Hidden::ANY) {
#pragma unroll
      for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (hidden(i >> 1, j, i & 1))
            s[j][i] = RowScores::LOWEST;
        }
      }
    }
    float rise[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = group_maximum<Hidden::ANY, ROUNDED>(s, r, key_scale);
      rise[r] = largest[r] - reference[r];
      if (Hidden::ANY && largest[r] == -INFINITY_F) // no key is seen, perhaps none was before
        rise[r] = -INFINITY_F;
    }
    max_logit.take(largest);
    if (__any_sync(~0u, rise[0] > RISE || rise[1] > RISE)) {
      float alpha[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool moves = rise[r] > RISE;
        alpha[r] = moves ? exp2_approx(-rise[r]) : 1.0f;
        reference[r] = moves ? largest[r] : reference[r];
        rise[r] = moves ? 0.0f : rise[r];
        sum[r] *= alpha[r];
      }
      sums.multiply_rows(alpha);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      beta[r] = exp2_approx(rise[r]);
  }

  /// Forms the group's P in 8 bits: 0 of hidden scores, which update_row_max() has lowered.
  template <typename Hidden>
  __device__ __forceinline__ void
  quantize_p(u32 (&p8)[KEY_SCALES][4], const RowScores::Sum (&s)[COLUMNS8][4],
             const float (&key_scale)[KEY_SCALES], const float (&largest)[2],
             const float (&beta)[2], const Hidden&) {
    float group_sum[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      offset[r] = LOG2_UNSIGNED_LEVELS - largest[r];
#pragma unroll
    for (int u = 0; u < KEY_SCALES; ++u) {
      float scale[2], addend[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = key_scale[u] * row_scale(r);
        addend[r] =
            RowScores::ZERO == 0 ? offset[r] : __fmaf_rn(-RowScores::ZERO, scale[r], offset[r]);
      }
      float p[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i >> 1;
          p[j][i] = exp2_approx(__fmaf_rn(RowScores::value(s[4 * u + j][i]), scale[r], addend[r]));
          if (Hidden::ANY && s[4 * u + j][i] == RowScores::LOWEST)
            p[j][i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) { // a tree: a chain would keep every P until its turn
        const float of_chunk = ((p[0][i] + p[0][i + 1]) + (p[1][i] + p[1][i + 1])) +
                               ((p[2][i] + p[2][i + 1]) + (p[3][i] + p[3][i + 1]));
        group_sum[i >> 1] = u == 0 ? of_chunk : group_sum[i >> 1] + of_chunk;
      }
      quantize_fragment<false>(p8[u], p, 1.0f, 1.0f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum[r] = __fmaf_rn(group_sum[r], beta[r], sum[r]);
  }

private:
  __device__ __forceinline__ float row_scale(int r) const {
    return SMOOTH_Q || HAS_SCORE ? 1 : score_scale[r];
  }

  /// Gives the maximum of row g + 8r over all columns; -inf where MASKED left none. Callers
  /// subtract from the rounded maximum, but ptxas makes one FFMA of both where it finds them in one
  /// piece of code. In most kernels it does not, and ROUNDED keeps it from that.
  template <bool MASKED, bool ROUNDED>
  __device__ __forceinline__ float group_maximum(const RowScores::Sum (&s)[COLUMNS8][4], int r,
                                                 const float (&key_scale)[KEY_SCALES]) const {
    // No P may round to 256. The exponents' addend and the maximum are rounded by less than 2
    // levels of a score where scores start from MAGIC, and else a part in 2^22.
    constexpr float HEADROOM = RowScores::ZERO == 0 ? 0 : 2;
    float largest = -INFINITY_F;
#pragma unroll
    for (int u = 0; u < KEY_SCALES; ++u) {
      RowScores::Sum top = s[4 * u][2 * r];
#pragma unroll
      for (int j = 4 * u; j < 4 * u + 4; ++j)
        top = RowScores::maximum_of(top, RowScores::maximum_of(s[j][2 * r], s[j][2 * r + 1]));
      float scaled = (RowScores::value(top) - (RowScores::ZERO - HEADROOM)) * key_scale[u];
      if (MASKED && top == RowScores::LOWEST)
        scaled = -INFINITY_F;
      largest = max_number(largest, scaled);
    }
    largest = quad_max_number(largest);
    if (MASKED && largest == -INFINITY_F)
      return largest;
    largest = ROUNDED ? __fmul_rn(largest, row_scale(r)) : largest * row_scale(r);
    return HEADROOM == 0 ? __fmaf_rn(fabsf(largest), 0x1p-22f, largest) : largest;
  }
};
