//===- tile/math/team_softmax.cuh - P of a group, by two warps for each 16 queries ----===//
//
// As tile/math/softmax.cuh, by a team of warps: warp w has queries 16 (w % 4) .. + 15 of the block,
// and keys 32 (w / 4) .. + 31 of the group. A query's maximum over the group is the larger of what
// two warps find, so that both raise the query's reference alike. Each keeps the sum of its P.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/math.cuh"
#include "tile/math/team_products.cuh"
#include "tile/walk/visible.cuh"

/// In units of log2, as in tile/math/softmax.cuh.
constexpr float RISE = 16.0f;

class TeamSoftmax {
public:
  static constexpr int N8 = 4;               ///< n8 tiles of keys of a warp
  static constexpr int LOWEST = -(1 << 30);  ///< below every score
  static constexpr int UNITS = BLOCK_Q / 16; ///< of 16 queries
  float reference[2] = {-INFINITY_F, -INFINITY_F};

  __device__ __forceinline__ TeamSoftmax(const Params& p, const QueryHead& at, int first_query) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + first_row() + (lane_id() >> 2) + 8 * r;
      score_scale_[r] = read_row(p.q_rows, at.padded_query(), query, ROW_SCALE);
      if constexpr (SINK_KEYS) {
        reference[r] = read_row(p.q_rows, at.padded_query(), query, ROW_SINK);
        if (is_first_half() && (lane_id() & 3) == 0) // NaN of a score that is not finite
          sum_[r] = UNSIGNED_LEVELS + (reference[r] - reference[r]);
      }
    }
  }

  static __device__ __forceinline__ int first_row() { return warp_id() % UNITS * 16; }
  static __device__ __forceinline__ int first_column() { return warp_id() / UNITS * (8 * N8); }
  static __device__ __forceinline__ bool is_first_half() { return warp_id() < UNITS; }

  /// The scale of the thread's keys of the group that begins at padded key `first`.
  __device__ __forceinline__ void read_key_scale(const Params& p, s64 first) {
    const int key = static_cast<int>(first & 127) + first_column() + 2 * (lane_id() & 3);
    key_scale_ = __ldg(p.k8_scale + (first >> 7) * (128 / KEYS_A_SCALE) + key_scale_place(key));
  }

  /// Makes P of the group's scores, as fragments at `p`, and at `factors` of each query what its O
  /// is multiplied with and what its products are. All warps call this; a barrier follows before
  /// anybody reads.
  template <typename Hidden>
  __device__ __forceinline__ void form_p(int (&s)[N8][4], const Hidden& hidden, u32 maxima,
                                         u32 factors, u32 p) {
    float largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int top = LOWEST;
#pragma unroll
      for (int j = 0; j < N8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (Hidden::ANY && hidden(r, j, half))
            s[j][2 * r + half] = LOWEST;
          top = maximum(top, s[j][2 * r + half]);
        }
      }
      float scaled = static_cast<float>(top) * key_scale_;
      if (Hidden::ANY && top == LOWEST)
        scaled = -INFINITY_F;
      largest[r] = quad_max_number(scaled);
      if ((lane_id() & 3) == 0)
        write_float(place(maxima, r), largest[r]);
    }
    __syncthreads();
    float alpha[2], beta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = max_number(largest[r], read_float(other_place(maxima, r)));
      if (largest[r] != -INFINITY_F) {
        largest[r] *= score_scale_[r];
        // No P may round to 256.
        largest[r] = __fmaf_rn(fabsf(largest[r]), 0x1p-22f, largest[r]);
      }
      float rise = largest[r] - reference[r];
      if (Hidden::ANY && largest[r] == -INFINITY_F) // no key is seen, perhaps none was before
        rise = -INFINITY_F;
      const bool moves = rise > RISE;
      alpha[r] = moves ? exp2_approx(-rise) : 1.0f;
      reference[r] = moves ? largest[r] : reference[r];
      beta[r] = exp2_approx(moves ? 0.0f : rise);
      if (is_first_half() && (lane_id() & 3) == 0) {
        const float both[2] = {alpha[r], beta[r]};
        write_float2(factors + (first_row() + 8 * r + (lane_id() >> 2)) * 8, both);
      }
    }
    float x[N8][4], group_sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < N8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i >> 1;
        x[j][i] = exp2_approx(__fmaf_rn(static_cast<float>(s[j][i]), key_scale_ * score_scale_[r],
                                        LOG2_UNSIGNED_LEVELS - largest[r]));
        if (Hidden::ANY && s[j][i] == LOWEST)
          x[j][i] = 0;
        group_sum[r] += x[j][i];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum_[r] = __fmaf_rn(group_sum[r], beta[r], sum_[r] * alpha[r]);
    u32 p8[4];
    quantize_fragment<false>(p8, x, 1.0f, 1.0f);
    write_words(fragment_of_lane(p, warp_id() % UNITS * 2 + warp_id() / UNITS), p8);
  }

  /// Hands the sums of P to the other warp, and behind a barrier gives that of both.
  __device__ __forceinline__ void exchange_sums(u32 to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] = quad_sum(sum_[r]);
      if ((lane_id() & 3) == 0)
        write_float(place(to, r), sum_[r]);
    }
    __syncthreads();
  }
  __device__ __forceinline__ float whole_sum(u32 at, int r) const {
    return sum_[r] + read_float(other_place(at, r));
  }

private:
  /// Where a query's number of this warp lies, and that of the other one.
  static __device__ __forceinline__ u32 place(u32 at, int r, int half) {
    return at + (half * BLOCK_Q + first_row() + 8 * r + (lane_id() >> 2)) * 4;
  }
  static __device__ __forceinline__ u32 place(u32 at, int r) {
    return place(at, r, is_first_half() ? 0 : 1);
  }
  static __device__ __forceinline__ u32 other_place(u32 at, int r) {
    return place(at, r, is_first_half() ? 1 : 0);
  }

  float score_scale_[2]; ///< of a row's scores, in log2 units
  float key_scale_;
  float sum_[2] = {0, 0}; ///< of this thread's columns, times 255
};
