//===- tile/products_wgmma.cuh - Products of 64 rows a warpgroup, sm_90a ----===//
//
// The names of products_mma.cuh. A product runs while its warps go on: issue_... starts one and
// commits it as a group of its own, finish<PENDING> waits until at most that many are under way.
// Operands of S and dP are read from shared memory, so that they cost no registers.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/wgmma.cuh"
#include "tile/accumulators.cuh"
#include "tile/shared_tile.cuh"

constexpr int SCORE_STEPS = SCORE_ROW_BYTES / 32;
constexpr int VALUE_STEPS = VALUE_ROW_BYTES / 32;

struct IntegerScores {
  using Sum = int;
  static __device__ __forceinline__ void multiply(int (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_s8(d, a, b, accumulate);
  }
  static __device__ __forceinline__ float scaled(int sum, float scale) {
    return static_cast<float>(sum) * scale;
  }
};
struct FloatScores {
  using Sum = float;
  static __device__ __forceinline__ void multiply(float (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_16<Element>(d, a, b, accumulate);
  }
  static __device__ __forceinline__ float scaled(float sum, float) { return sum; }
};
template <bool FLOATING> struct ScoresOf { using type = IntegerScores; };
template <> struct ScoresOf<true> { using type = FloatScores; };
using Scores = ScoresOf<QK16>::type;

/// The tile of 64 rows that this warpgroup's A operand is.
template <int ROW_BYTES> struct SharedRows {
  u32 tile;
  __device__ __forceinline__ void load(u32 tiles, int row) {
    tile = WARPS == 4 ? tiles : tiles + row / TILE_ROWS * (TILE_ROWS * ROW_BYTES);
  }
};
using ScoreRows = SharedRows<SCORE_ROW_BYTES>;
using ValueRows = SharedRows<VALUE_ROW_BYTES>;

/// Makes this thread's finished copies into shared memory visible to the products.
__device__ __forceinline__ void publish_copies() { fence_async_proxy(); }

/// From a tile's descriptor to that of 32 bytes along its rows.
template <int ROW_BYTES> __device__ __forceinline__ u64 advance(u64 descriptor, int step) {
  constexpr int STEPS_A_PANEL = PITCH<ROW_BYTES> / 32;
  return descriptor +
         (step / STEPS_A_PANEL * PANEL_BYTES<ROW_BYTES> + step % STEPS_A_PANEL * 32) / 16;
}

/// s = rows of A x (64 rows of the tile)^T, for S.
template <typename Rows>
__device__ __forceinline__ void issue_scores(Scores::Sum (*s)[4], const Rows& rows, u32 tile) {
  const u64 a = matrix_descriptor<PITCH<SCORE_ROW_BYTES>>(rows.tile);
  const u64 b = matrix_descriptor<PITCH<SCORE_ROW_BYTES>>(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < SCORE_STEPS; ++step)
    Scores::multiply(s, advance<SCORE_ROW_BYTES>(a, step), advance<SCORE_ROW_BYTES>(b, step),
                     step > 0);
  wgmma_commit();
}

/// The same for dP, in 16 bits. `start`, from which sums of columns 8j..8j+7 start, is added when
/// they are finished: accumulators are not written while a product is under way.
template <typename Rows, typename Start>
__device__ __forceinline__ void issue_values(float (*s)[4], const Rows& rows, u32 tile,
                                             const Start& start) {
  const u64 a = matrix_descriptor<PITCH<VALUE_ROW_BYTES>>(rows.tile);
  const u64 b = matrix_descriptor<PITCH<VALUE_ROW_BYTES>>(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step)
    wgmma_16<Element>(s, advance<VALUE_ROW_BYTES>(a, step), advance<VALUE_ROW_BYTES>(b, step),
                      step > 0);
  wgmma_commit();
}

template <int PENDING, typename Sum, int N>
__device__ __forceinline__ void finish(Sum (&sums)[N][4]) {
  wgmma_wait<PENDING>();
#pragma unroll
  for (int j = 0; j < N; ++j)
    hold(sums[j]);
}

template <int PENDING, int N, typename Start>
__device__ __forceinline__ void finish_values(float (&sums)[N][4], const Start& start) {
  finish<PENDING>(sums);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const Quad quad = start(j);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[j][i] += quad.x[i];
  }
}

/// (Rows of 8-bit A, STEPS x 32 summed tokens) x transposed tiles. `tiles` holds the 64-token tiles
/// of the group one after the other.
template <bool SIGNED, int STEPS> class TokenProducts {
public:
  __device__ __forceinline__ void issue(const u32 (&a)[STEPS][4], u32 tiles) {
    const u64 b = matrix_descriptor<TOKEN_ROW_BYTES>(tiles);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int part = 0; part < HEAD_DIM / 64; ++part)
        wgmma_8<SIGNED>(&products_[part * 8], a[step],
                        b + (step / 2 * (HEAD_DIM * TOKEN_ROW_BYTES) +
                             part * (64 * TOKEN_ROW_BYTES) + step % 2 * 32) /
                                16,
                        step > 0);
    }
    wgmma_commit();
  }
  /// sum += products, dequantised by the column's scale (HEAD_DIM of them at `column_scales`) times
  /// the row's: `scale_low` (row g) or `scale_high` (row g + 8).
  template <int PENDING>
  __device__ __forceinline__ void add_to(float (&sum)[HEAD_DIM / 8][4], u32 column_scales,
                                         float scale_low, float scale_high) {
    finish<PENDING>(products_);
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
      const float4 columns = read_columns(column_scales, pair);
      const float column_scale[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float product = static_cast<float>(products_[2 * pair + half][i]);
          const float scale = column_scale[2 * half + (i & 1)] * (i < 2 ? scale_low : scale_high);
          sum[2 * pair + half][i] = __fmaf_rn(product, scale, sum[2 * pair + half][i]);
        }
      }
    }
  }

private:
  int products_[HEAD_DIM / 8][4];
};
