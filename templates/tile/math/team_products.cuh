//===- tile/math/team_products.cuh - Products whose channels warps share out -------===//
//
// Sums of a gradient, or of O, over 512 channels are more than a warp's registers hold. So the
// warps of a block are a team. Each forms the scores of 16 rows and some columns, and hands P and
// dS to all as fragments of operand A. Each sums, for all rows of the block, the channels 64 j + 8
// w to 64 j + 8 w + 7, j = 0 .. 7, if it is warp w: so each of them has as much to do with every
// chunk of the other operand.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/mma.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/math/magic_start.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/memory/chunks.cuh"

constexpr int OWN_N8 = HEAD_DIM / 8 / WARPS; ///< n8 tiles of channels that a warp sums

/// The first channel of n8 tile j of this warp, and of them this lane's two.
__device__ __forceinline__ int octet_of(int j) { return 64 * j + 8 * warp_id(); }
__device__ __forceinline__ int pair_of(int j) { return octet_of(j) + 2 * (lane_id() & 3); }
/// Those two channels' values of a vector in the order sigma.
__device__ __forceinline__ float2 column_pair(const float* vector, int j) {
  const int place = octet_of(j) / 16 * 16 + (lane_id() & 3) * 4 + (warp_id() & 1) * 2;
  return __ldg(reinterpret_cast<const float2*>(vector + place));
}

//===--- Scores ------------------------------------------------------------===//

/// Adds a chunk's part to the products of 16 rows, at `rows` in a panel of the block's own, and
/// PAIRS times 16 columns, from row `column` of the chunk on. In 8 bits sums are integers from 0:
/// with 512 channels they may pass what MAGIC leaves exact.
template <int PAIRS>
__device__ __forceinline__ void add_scores(int (&s)[2 * PAIRS][4], u32 rows, u32 slot, int column) {
#pragma unroll
  for (int step = 0; step < STEPS_A_CHUNK; ++step) {
    u32 a[4];
    load_fragment<PANEL_ROW>(a, rows + a_lane_offset<PANEL_ROW>(), 0, step);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      u32 b[4];
      load_fragment<PANEL_ROW>(b, slot + column * PANEL_ROW + b_lane_offset<PANEL_ROW>(), pair * 16,
                               step);
      mma_s8(s[2 * pair], a, b[0], b[1], s[2 * pair]);
      mma_s8(s[2 * pair + 1], a, b[2], b[3], s[2 * pair + 1]);
    }
  }
}
/// Does so in 16 bits.
__device__ __forceinline__ void add_values(float (&s)[2][4], u32 rows, u32 slot, int column) {
#pragma unroll
  for (int step = 0; step < STEPS_A_CHUNK; ++step) {
    u32 a[4], b[4];
    load_fragment<PANEL_ROW>(a, rows + a_lane_offset<PANEL_ROW>(), 0, step);
    load_fragment<PANEL_ROW>(b, slot + column * PANEL_ROW + b_lane_offset<PANEL_ROW>(), 0, step);
    mma_16<Element>(s[0], a, b[0], b[1], s[0]);
    mma_16<Element>(s[1], a, b[2], b[3], s[1]);
  }
}

//===--- Operands ----------------------------------------------------------===//

/// A fragment of operand A lies as the lanes have it.
__device__ __forceinline__ u32 fragment_of_lane(u32 fragments, int number) {
  return fragments + number * TeamLayout::FRAGMENT + lane_id() * 16;
}
/// Writes 16 columns of a warp's accumulators: in 8 bits they are one half of a fragment of 32
/// columns, in 16 bits a whole one. `row` and `column` count fragments' rows and 16 columns.
template <bool SIGNED>
__device__ __forceinline__ void write_half_fragment(u32 fragments, int row, int column,
                                                    const float (&x)[2][4], float low_inverse,
                                                    float high_inverse) {
  const u32 to = fragment_of_lane(fragments, row * 2 + column / 2) + column % 2 * 8;
  write_word(to, pack_scaled<SIGNED>(x[0][0], x[0][1], x[1][0], x[1][1], low_inverse));
  write_word(to + 4, pack_scaled<SIGNED>(x[0][2], x[0][3], x[1][2], x[1][3], high_inverse));
}
__device__ __forceinline__ void write_fragment16(u32 fragments, int row, int column,
                                                 const float (&x)[2][4]) {
  u32 a[1][4];
  pack_fragments<1>(a, x);
  write_words(fragment_of_lane(fragments, row * 4 + column), a[0]);
}

/// Operand A of ROWS times 16 rows and 64 summed tokens: STEPS fragments of each. HELD rows' are
/// kept in registers, the others read again each time they are needed.
template <int ROWS, int STEPS, int HELD = ROWS> struct TeamOperand {
  u32 a[HELD][STEPS][4];
  u32 place;
  __device__ __forceinline__ void read(u32 fragments) {
    place = fragments;
#pragma unroll
    for (int row = 0; row < HELD; ++row) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        read_words(a[row][step], fragment_of_lane(fragments, row * STEPS + step));
    }
  }
  __device__ __forceinline__ void get(u32 (&fragment)[4], int row, int step) const {
    if (row >= HELD) {
      read_words(fragment, fragment_of_lane(place, row * STEPS + step));
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragment[i] = a[row < HELD ? row : 0][step][i];
  }
};

//===--- Sums --------------------------------------------------------------===//

/// A warp's sums of ROWS times 16 rows and its channels. As `Sums` they are in units of scales of
/// channels, and too large by their rows' bias.
template <int ROWS> struct TeamSums {
  float x[ROWS][OWN_N8][4] = {};
  float bias[ROWS][2] = {};

  /// Adds the products of 8-bit operands, from chunk `chunk` of a transposed tile, times the rows'
  /// factors.
  template <bool SIGNED, int HELD>
  __device__ __forceinline__ void add(const TeamOperand<ROWS, 2, HELD>& operand, u32 slot,
                                      int chunk, const float (&factor)[ROWS][2]) {
    static_assert(exact_with_magic(SIGNED ? 127 : 255, 127, TOKENS_PER_TILE));
    const MagicStart start;
    const int lane = lane_id(), channel = (lane & 7) + 8 * warp_id() + (lane >> 4) * 64;
    u32 b[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step)
      ldmatrix_x4(b[step],
                  slot + chunk_offset<TOKENS_PER_TILE>(channel, 2 * step + (lane >> 3 & 1)));
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      u32 a[2][4];
      operand.get(a[0], row, 0);
      operand.get(a[1], row, 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int product[4];
        multiply<SIGNED>(product, a[0], &b[0][2 * half], start.bits);
        multiply<SIGNED>(product, a[1], &b[1][2 * half], product);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = x[row][2 * chunk + half][i];
          sum = __fmaf_rn(__int_as_float(product[i]), factor[row][i >> 1], sum);
        }
      }
      if (chunk == 0) { // of the whole row
#pragma unroll
        for (int r = 0; r < 2; ++r)
          bias[row][r] = __fmaf_rn(MAGIC, factor[row][r], bias[row][r]);
      }
    }
  }
  /// Adds the products of 16-bit operands, with a panel of rows of the other one.
  __device__ __forceinline__ void add(const TeamOperand<ROWS, 4>& operand, u32 slot, int panel) {
    const u32 tokens = slot + chunk_offset<PANEL_ROW>(lane_id(), warp_id());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 b[4];
      ldmatrix_x4_transposed(b, tokens + half * 32 * PANEL_ROW);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float(&sum)[4] = x[row][panel];
        mma_16<Element>(sum, operand.a[row][2 * half], b[0], b[1], sum);
        mma_16<Element>(sum, operand.a[row][2 * half + 1], b[2], b[3], sum);
      }
    }
  }
  /// Subtracts the bias and multiplies each column by that of a vector, or by the products of two:
  /// scales that sums are in, and inverses of others.
  __device__ __forceinline__ void multiply_columns(const float* of, const float* by = nullptr) {
#pragma unroll
    for (int j = 0; j < OWN_N8; ++j) {
      float2 factor = column_pair(of, j);
      if (by != nullptr) {
        const float2 other = column_pair(by, j);
        factor.x *= other.x, factor.y *= other.y;
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = x[row][j][i];
          sum = (sum - bias[row][i >> 1]) * (i & 1 ? factor.y : factor.x);
        }
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      bias[row][0] = bias[row][1] = 0;
  }
  __device__ __forceinline__ void multiply_rows(const float (&factor)[ROWS][2]) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int j = 0; j < OWN_N8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[row][j][i] *= factor[row][i >> 1];
      }
      bias[row][0] *= factor[row][0];
      bias[row][1] *= factor[row][1];
    }
  }
  /// Writes the first `valid` of the rows to a tensor.
  __device__ __forceinline__ void store(Element* rows, s64 stride, int valid, int channels,
                                        const float (&factor)[ROWS][2]) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int place = row * 16 + 8 * r + (lane_id() >> 2);
        if (place >= valid)
          continue;
#pragma unroll
        for (int j = 0; j < OWN_N8; ++j) {
          if (is_channel(octet_of(j), channels))
            *reinterpret_cast<u32*>(rows + place * stride + pair_of(j)) = pack<Element>(
                x[row][j][2 * r] * factor[row][r], x[row][j][2 * r + 1] * factor[row][r]);
        }
      }
    }
  }

private:
  template <bool SIGNED>
  static __device__ __forceinline__ void multiply(int (&d)[4], const u32 (&a)[4], const u32* b,
                                                  const int (&c)[4]) {
    if constexpr (SIGNED)
      mma_s8(d, a, b[0], b[1], c);
    else
      mma_u8(d, a, b[0], b[1], c);
  }
};
