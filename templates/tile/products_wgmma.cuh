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

/// Whether products run while their warps go on.
constexpr bool ASYNCHRONOUS = true;

constexpr int SCORE_STEPS = SCORE_ROW_BYTES / 32;
constexpr int VALUE_STEPS = VALUE_ROW_BYTES / 32;

/// As in products_mma.cuh; here products start from 0 and take a conversion each.
struct IntegerScores {
  using Sum = int;
  static constexpr float ZERO = 0;
  static constexpr int LOWEST = -(1 << 22);
  static __device__ __forceinline__ void multiply(int (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_s8(d, a, b, accumulate);
  }
  /// With the rows of two tiles: 8-bit tiles have one panel, so that these are evenly spaced.
  static constexpr bool TAKES_TWO_TILES = true;
  static __device__ __forceinline__ void multiply_two(int (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_s8_wide(d, a, b, accumulate);
  }
  static __device__ __forceinline__ float value(int sum) { return static_cast<float>(sum); }
  static __device__ __forceinline__ int maximum_of(int a, int b) { return maximum(a, b); }
};
struct FloatScores {
  using Sum = float;
  static constexpr float ZERO = 0;
  static constexpr float LOWEST = -3.0e38f;
  static constexpr bool TAKES_TWO_TILES = false;
  static __device__ __forceinline__ void multiply(float (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_16<Element>(d, a, b, accumulate);
  }
  static __device__ __forceinline__ float value(float sum) { return sum; }
  static __device__ __forceinline__ float maximum_of(float a, float b) { return max_number(a, b); }
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

/// s = rows of A x (rows of TILES tiles, one after the other)^T, for S.
template <int TILES = 1, typename Rows, typename S = Scores>
__device__ __forceinline__ void issue_scores(Scores::Sum (*s)[4], const Rows& rows, u32 tiles) {
  const u64 a = matrix_descriptor<PITCH<SCORE_ROW_BYTES>>(rows.tile);
  const u64 b = matrix_descriptor<PITCH<SCORE_ROW_BYTES>>(tiles);
  wgmma_fence();
  if constexpr (TILES == 2 && S::TAKES_TWO_TILES) {
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; ++step)
      S::multiply_two(s, advance<SCORE_ROW_BYTES>(a, step), advance<SCORE_ROW_BYTES>(b, step),
                      step > 0);
  } else {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int step = 0; step < SCORE_STEPS; ++step)
        Scores::multiply(&s[tile * 8], advance<SCORE_ROW_BYTES>(a, step),
                         advance<SCORE_ROW_BYTES>(b, step) +
                             tile * (TILE_ROWS * SCORE_ROW_BYTES) / 16,
                         step > 0);
    }
  }
  wgmma_commit();
}

/// The same for dP, in 16 bits. `start`, from which sums of columns 8j..8j+7 start, is added when
/// they are finished: accumulators are not written while a product is under way. Sums are floats,
/// or integers that are their bits.
template <int COLUMNS = TILE_ROWS, typename Sum, typename Rows, typename Start>
__device__ __forceinline__ void issue_values(Sum (*s)[4], const Rows& rows, u32 tile,
                                             const Start& start) {
  static_assert(COLUMNS == TILE_ROWS);
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
      const u64 step_b = b + (step / 2 * (HEAD_DIM * TOKEN_ROW_BYTES) + step % 2 * 32) / 16;
      if constexpr (HEAD_DIM == 128)
        wgmma_8_wide<SIGNED>(products_, a[step], step_b, step > 0);
      else
        wgmma_8<SIGNED>(products_, a[step], step_b, step > 0);
    }
    wgmma_commit();
  }
  /// sums += products times the row's scale: `low` (row g) or `high` (row g + 8).
  template <int PENDING> __device__ __forceinline__ void add_to(Sums& sums, float low, float high) {
    finish<PENDING>(products_);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums.x[j][i] =
            __fmaf_rn(static_cast<float>(products_[j][i]), i < 2 ? low : high, sums.x[j][i]);
    }
    sums.surplus[0] = sums.surplus[1] = 0; // for ptxas to see that there is none
  }

private:
  int products_[HEAD_DIM / 8][4];
};

/// The accumulators of any product with 64 columns. Products that take turns in one block need no
/// more registers; in arrays of their own they would, whenever they live.
struct Block {
  int x[8][4];
  /// (Rows of 8-bit A, STEPS x 32 summed tokens) x channels 64 * part.. of transposed tiles.
  template <bool SIGNED, int STEPS>
  __device__ __forceinline__ void issue(const u32 (&a)[STEPS][4], u32 tiles, int part) {
    const u64 b = matrix_descriptor<TOKEN_ROW_BYTES>(tiles);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      wgmma_8<SIGNED>(x, a[step],
                      b + (step / 2 * (HEAD_DIM * TOKEN_ROW_BYTES) + part * (64 * TOKEN_ROW_BYTES) +
                           step % 2 * 32) /
                              16,
                      step > 0);
    wgmma_commit();
  }
  /// sums += those products times the row's scale: `low` (row g) or `high` (row g + 8).
  template <bool SIGNED, int PENDING>
  __device__ __forceinline__ void add_to(Sums& sums, float low, float high, int part) {
    finish<PENDING>(x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums.x[8 * part + j][i];
        sum = __fmaf_rn(static_cast<float>(x[j][i]), i < 2 ? low : high, sum);
      }
    }
  }
};

/// Where S and dP are formed: in a block if they fit, else in an array of their own.
__device__ __forceinline__ auto score_sums(Block& block, int (&)[8][4]) -> int (&)[8][4] {
  return block.x;
}
__device__ __forceinline__ auto score_sums(Block&, float (&own)[8][4]) -> float (&)[8][4] {
  return own;
}
__device__ __forceinline__ auto value_sums(Block& block, float (&)[8][4]) -> int (&)[8][4] {
  return block.x;
}
/// The finished sums of dP, from where they start.
template <int PENDING, typename Start>
__device__ __forceinline__ void take_values(float (&values)[8][4], int (&sums)[8][4],
                                            const Start& start) {
  finish<PENDING>(sums);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const Quad quad = start(j);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[j][i] = __int_as_float(sums[j][i]) + quad.x[i];
  }
}

/// sums += (rows of 16-bit A, STEPS x 16 summed tokens) x a tile of 16-bit tokens by channels, as
/// it lies in the caller's tensor: B with its columns contiguous.
template <int STEPS>
__device__ __forceinline__ void issue_rows(Sums& sums, const u32 (&a)[STEPS][4], u32 tile) {
  const u64 b = matrix_descriptor<PITCH<VALUE_ROW_BYTES>>(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 64; ++part)
      wgmma_16_transposed<Element>(
          &sums.x[part * 8], a[step],
          b + (part * PANEL_BYTES<VALUE_ROW_BYTES> + step * 16 * PITCH<VALUE_ROW_BYTES>) / 16,
          true);
  }
  wgmma_commit();
}
template <int PENDING> __device__ __forceinline__ void finish_rows(Sums& sums) {
  finish<PENDING>(sums.x);
}
