//===- tile/products_mma.cuh - Products of 16 rows a warp, with mma.sync ----===//
//
// The same names stand in products_wgmma.cuh, where products run asynchronously: issue_... starts
// one, finish waits for it. Here they are done when issue_... returns.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/mma.cuh"
#include "tile/accumulators.cuh"
#include "tile/fragments.cuh"

constexpr int SCORE_STEPS = SCORE_ROW_BYTES / 32;
constexpr int VALUE_STEPS = VALUE_ROW_BYTES / 32;

/// S accumulates in FP32 or, for INT8, in INT32 from MAGIC_BITS, so that its bits are MAGIC + S.
struct IntegerScores {
  using Sum = int;
  static __device__ __forceinline__ void multiply(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  bool first) {
    const int start[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    if (first)
      mma_s8(d, a, b0, b1, start);
    else
      mma_s8(d, a, b0, b1, d);
  }
  /// sum * scale in one instruction. Exact but for the last rounding: key scales have 22 bits, so
  /// that MAGIC * scale is exact.
  static __device__ __forceinline__ float scaled(int sum, float scale) {
    return __fmaf_rn(__int_as_float(sum), scale, -MAGIC * scale);
  }
};
struct FloatScores {
  using Sum = float;
  static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  bool first) {
    const float start[4] = {0, 0, 0, 0};
    if (first)
      mma_16<Element>(d, a, b0, b1, start);
    else
      mma_16<Element>(d, a, b0, b1, d);
  }
  static __device__ __forceinline__ float scaled(float sum, float) { return sum; }
};
template <bool FLOATING> struct ScoresOf { using type = IntegerScores; };
template <> struct ScoresOf<true> { using type = FloatScores; };
using Scores = ScoresOf<QK16>::type;

/// A's fragments of 16 rows: kept in registers, or read again each time they are needed.
template <int ROW_BYTES, bool IN_REGISTERS> struct RowFragments;
template <int ROW_BYTES> struct RowFragments<ROW_BYTES, true> {
  u32 a[ROW_BYTES / 32][4];
  __device__ __forceinline__ void load(u32 tile, int row) {
    const u32 address = tile + a_lane_offset<ROW_BYTES>();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step)
      load_fragment<ROW_BYTES>(a[step], address, row, step);
  }
  __device__ __forceinline__ void get(u32 (&fragment)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragment[i] = a[step][i];
  }
};
template <int ROW_BYTES> struct RowFragments<ROW_BYTES, false> {
  u32 address;
  __device__ __forceinline__ void load(u32 tile, int row) {
    address = tile + a_lane_offset<ROW_BYTES>() + row_offset<ROW_BYTES>(row);
  }
  __device__ __forceinline__ void get(u32 (&fragment)[4], int step) const {
    load_fragment<ROW_BYTES>(fragment, address, 0, step);
  }
};

using ScoreRows = RowFragments<SCORE_ROW_BYTES, SCORE_ROWS_IN_REGISTERS>;
using ValueRows = RowFragments<VALUE_ROW_BYTES, VALUE_ROWS_IN_REGISTERS>;

/// The products read shared memory as every other instruction does.
__device__ __forceinline__ void publish_copies() {}

/// s = rows of A x (64 rows of the tile)^T, for S.
template <typename Rows>
__device__ __forceinline__ void issue_scores(Scores::Sum (*s)[4], const Rows& rows, u32 tile) {
  const u32 address = tile + b_lane_offset<SCORE_ROW_BYTES>();
#pragma unroll
  for (int step = 0; step < SCORE_STEPS; ++step) {
    u32 a[4];
    rows.get(a, step);
#pragma unroll
    for (int pair = 0; pair < TILE_ROWS / 16; ++pair) {
      u32 b[4];
      load_fragment<SCORE_ROW_BYTES>(b, address, pair * 16, step);
      Scores::multiply(s[2 * pair], a, b[0], b[1], step == 0);
      Scores::multiply(s[2 * pair + 1], a, b[2], b[3], step == 0);
    }
  }
}

/// The same for dP, in 16 bits. The sum of columns 8j..8j+7 starts from start(j).
template <typename Rows, typename Start>
__device__ __forceinline__ void issue_values(float (*s)[4], const Rows& rows, u32 tile,
                                             const Start& start) {
  const u32 address = tile + b_lane_offset<VALUE_ROW_BYTES>();
#pragma unroll VALUE_UNROLL
  for (int step = 0; step < VALUE_STEPS; ++step) {
    u32 a[4];
    rows.get(a, step);
#pragma unroll
    for (int pair = 0; pair < TILE_ROWS / 16; ++pair) {
      u32 b[4];
      load_fragment<VALUE_ROW_BYTES>(b, address, pair * 16, step);
      if (step == 0) {
        mma_16<Element>(s[2 * pair], a, b[0], b[1], start(2 * pair).x);
        mma_16<Element>(s[2 * pair + 1], a, b[2], b[3], start(2 * pair + 1).x);
      } else {
        mma_16<Element>(s[2 * pair], a, b[0], b[1], s[2 * pair]);
        mma_16<Element>(s[2 * pair + 1], a, b[2], b[3], s[2 * pair + 1]);
      }
    }
  }
}

template <int PENDING, typename Sum, int N> __device__ __forceinline__ void finish(Sum (&)[N][4]) {}
template <int PENDING, int N, typename Start>
__device__ __forceinline__ void finish_values(float (&)[N][4], const Start&) {}

/// (Rows of 8-bit A, STEPS x 32 summed tokens) x transposed tiles. `tiles` holds the 64-token tiles
/// of the group one after the other. Sums are formed 16 columns at a time, when they are added.
template <bool SIGNED, int STEPS> class TokenProducts {
public:
  __device__ __forceinline__ void issue(const u32 (&a)[STEPS][4], u32 tiles) {
    address_ = tiles + b_lane_offset<TOKEN_ROW_BYTES>();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a_[step][i] = a[step][i];
    }
  }
  /// sum += products, dequantised by the column's scale (HEAD_DIM of them at `column_scales`) times
  /// the row's: `scale_low` (row g) or `scale_high` (row g + 8).
  template <int PENDING>
  __device__ __forceinline__ void add_to(float (&sum)[HEAD_DIM / 8][4], u32 column_scales,
                                         float scale_low, float scale_high) const {
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
      int products[2][4] = {{MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS},
                            {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS}};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 b[4];
        load_fragment<TOKEN_ROW_BYTES>(b, address_ + step / 2 * (HEAD_DIM * TOKEN_ROW_BYTES),
                                       pair * 16, step % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (SIGNED)
            mma_s8(products[half], a_[step], b[2 * half], b[2 * half + 1], products[half]);
          else
            mma_u8(products[half], a_[step], b[2 * half], b[2 * half + 1], products[half]);
        }
      }
      const float4 columns = read_columns(column_scales, pair);
      const float column_scale[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float product = __int_as_float(products[half][i]) - MAGIC;
          const float scale = column_scale[2 * half + (i & 1)] * (i < 2 ? scale_low : scale_high);
          sum[2 * pair + half][i] = __fmaf_rn(product, scale, sum[2 * pair + half][i]);
        }
      }
    }
  }

private:
  u32 a_[STEPS][4];
  u32 address_;
};
