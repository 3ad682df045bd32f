//===- tile/math/products_wgmma.cuh - Products of 64 rows a warpgroup, sm_90a ----===//
//
// This file has the names of products_mma.cuh. A product runs while its warps go on: issue_...
// starts one and commits it as a group of its own, finish<PENDING> waits until at most that many
// are under way. Operands of S and dP are read from shared memory, so that they cost no registers.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/wgmma.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/math/magic_product.cuh"
#include "tile/memory/shared_tile.cuh"
#include "tile/memory/wgmma_operands.cuh"

/// Whether products run while their warps go on.
constexpr bool ASYNCHRONOUS = true;

constexpr int SCORE_STEPS = SCORE_ROW_BYTES / 32;
constexpr int VALUE_STEPS = VALUE_ROW_BYTES / 32;

/// As in products_mma.cuh. If scores start from 0 and other tiles' from MAGIC, they are taken for
/// what those are, so that all give the same bits; else they take a conversion each.
struct IntegerScores {
  static_assert(!MAGIC_SCORES || exact_with_magic(127, 127, HEAD_DIM));
  using Sum = int;
  static constexpr float ZERO = MAGIC_SCORES ? MAGIC : 0;
  static constexpr int LOWEST = (SCORES_FROM_MAGIC ? MAGIC_BITS : 0) - (1 << 22);
  static __device__ __forceinline__ void multiply(int (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_s8(d, a, b, accumulate);
  }
  /// With the rows of two tiles: where tiles have one panel, these are evenly spaced.
  static constexpr bool TAKES_TWO_TILES = PITCH<SCORE_ROW_BYTES> == SCORE_ROW_BYTES;
  static __device__ __forceinline__ void multiply_two(int (*d)[4], u64 a, u64 b, bool accumulate) {
    wgmma_s8_wide(d, a, b, accumulate);
  }
  static __device__ __forceinline__ float value(int sum) {
    if constexpr (!MAGIC_SCORES)
      return static_cast<float>(sum);
    return __int_as_float(SCORES_FROM_MAGIC ? sum : sum + MAGIC_BITS);
  }
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

/// s = `start` + rows of A x (rows of TILES tiles, one after the other)^T, for S.
template <int TILES = 1, typename Rows, typename Tiles, typename Start = NoStart,
          typename S = Scores>
__device__ __forceinline__ void issue_scores(Scores::Sum (*s)[4], const Rows& rows, Tiles tiles,
                                             const Start& start = {}) {
  const u64 a = descriptor_of<PITCH<SCORE_ROW_BYTES>>(rows.tile);
  const u64 b = descriptor_of<PITCH<SCORE_ROW_BYTES>>(tiles);
  wgmma_fence();
  if constexpr (TILES == 2 && S::TAKES_TWO_TILES) {
    start.issue_wide(s);
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; ++step)
      S::multiply_two(s, advance<SCORE_ROW_BYTES>(a, step), advance<SCORE_ROW_BYTES>(b, step),
                      SCORES_FROM_MAGIC || step > 0);
  } else {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      start.issue(&s[tile * 8]);
#pragma unroll
      for (int step = 0; step < SCORE_STEPS; ++step)
        Scores::multiply(&s[tile * 8], advance<SCORE_ROW_BYTES>(a, step),
                         advance<SCORE_ROW_BYTES>(b, step) +
                             tile * (TILE_ROWS * SCORE_ROW_BYTES) / 16,
                         SCORES_FROM_MAGIC || step > 0);
    }
  }
  wgmma_commit();
}

/// Does so for dP, in 16 bits. `start`, from which sums of columns 8j..8j+7 start, is added when
/// they are finished: accumulators are not written while a product is under way. Sums are floats,
/// or integers that are their bits.
template <int COLUMNS = TILE_ROWS, typename Sum, typename Rows, typename Tile, typename Start>
__device__ __forceinline__ void issue_values(Sum (*s)[4], const Rows& rows, Tile tile,
                                             const Start& start) {
  static_assert(COLUMNS == TILE_ROWS);
  const u64 a = descriptor_of<PITCH<VALUE_ROW_BYTES>>(rows.tile);
  const u64 b = descriptor_of<PITCH<VALUE_ROW_BYTES>>(tile);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step)
    wgmma_16<Element>(s, advance<VALUE_ROW_BYTES>(a, step), advance<VALUE_ROW_BYTES>(b, step),
                      step > 0);
  wgmma_commit();
}

/// The family mma alone forms dP from parts of dO's channels.
template <int COLUMNS, int STEPS, typename Sum, typename Rows, typename Tile, typename Start>
__device__ __forceinline__ void issue_values(Sum (*s)[4], const Rows& rows, Tile tile,
                                             const Start& start, int) {
  static_assert(STEPS == VALUE_STEPS);
  issue_values<COLUMNS>(s, rows, tile, start);
}

/// Does so where columns start from what is at `place` in shared memory.
template <typename Sum, typename Rows, typename Tile, typename Start>
__device__ __forceinline__ void issue_values(Sum (*s)[4], const Rows& rows, Tile tile,
                                             const Start& start, u32 place) {
  const u64 a = descriptor_of<PITCH<VALUE_ROW_BYTES>>(rows.tile);
  const u64 b = descriptor_of<PITCH<VALUE_ROW_BYTES>>(tile);
  wgmma_fence();
  start.issue(s, place);
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step)
    wgmma_16<Element>(s, advance<VALUE_ROW_BYTES>(a, step), advance<VALUE_ROW_BYTES>(b, step),
                      true);
  wgmma_commit();
}

/// Sums of a product's rows g and g + 8 start from this, which the tensor cores form too: three
/// bf16, whose sum is the FP32 value, times a matrix whose first three rows are ones.
struct RowStart {
  u32 a[4];
  u64 ones;                              ///< descriptor of that matrix
  static constexpr int ONES_BYTES = 512; ///< all chunks of 16 bytes of the matrix are alike
  /// ONES_BYTES / 4 threads or more call this before fence_async_proxy().
  static __device__ __forceinline__ void write_ones(u32 address, int thread) {
    if (thread < ONES_BYTES / 4)
      write_word(address + thread * 4, thread % 4 == 0   ? pack<bf16>(1, 1)
                                       : thread % 4 == 1 ? pack<bf16>(1, 0)
                                                         : 0);
  }
  __device__ __forceinline__ RowStart(const float (&x)[2], u32 address) {
    constexpr u64 STRIDE = 0x3fffull << 32; // of none the 8 rows there are all rows
    ones = matrix_descriptor<64>(address) & ~STRIDE;
    const int pair = lane_id() & 3; // of columns of A
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float high = unpack<bf16>(pack<bf16>(x[r], 0)).x;
      const float middle = unpack<bf16>(pack<bf16>(x[r] - high, 0)).x;
      a[r] = pair == 0   ? pack<bf16>(high, middle)
             : pair == 1 ? pack<bf16>(x[r] - high - middle, 0)
                         : 0;
      a[2 + r] = 0;
    }
  }
};

/// Does so for dP with TILES tiles at once. Their rows lie panel after panel: the rows of both
/// tiles within each, so that they are evenly spaced.
template <int TILES, typename Rows, typename Tiles>
__device__ __forceinline__ void issue_value_panels(int (*s)[4], const Rows& rows, Tiles tiles,
                                                   const RowStart* start = nullptr) {
  static_assert(TILES <= 2);
  constexpr int STEPS_A_PANEL = PITCH<VALUE_ROW_BYTES> / 32;
  const u64 a = descriptor_of<PITCH<VALUE_ROW_BYTES>>(rows.tile);
  const u64 b = descriptor_of<PITCH<VALUE_ROW_BYTES>>(tiles);
  wgmma_fence();
  if (start && TILES == 2)
    wgmma_bf16_start_wide(s, start->a, start->ones);
  else if (start)
    wgmma_bf16_start(s, start->a, start->ones);
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step) {
    const u64 step_a = advance<VALUE_ROW_BYTES>(a, step);
    const u64 step_b = b + (step / STEPS_A_PANEL * TILES * PANEL_BYTES<VALUE_ROW_BYTES> +
                            step % STEPS_A_PANEL * 32) /
                               16;
    if constexpr (TILES == 2)
      wgmma_16_wide<Element>(s, step_a, step_b, start || step > 0);
    else
      wgmma_16<Element>(s, step_a, step_b, start || step > 0);
  }
  wgmma_commit();
}

/// The family mma alone sums dP in FP16.
template <int N> struct HalfSums {
  template <int STEPS = VALUE_STEPS, typename Rows>
  __device__ __forceinline__ void form(const Rows&, u32, int = 0) {}
  template <typename X>
  __device__ __forceinline__ void subtract_delta_of_rows(float (&)[N][4], X&, X&) const {}
  __device__ __forceinline__ void subtract_delta_of_columns(float (&)[N][4], u32, u32) const {}
};

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

/// Channels of products that are formed at a time: their accumulators are not those of the sums.
constexpr int PRODUCT_CHANNELS = SUM_CHANNELS < 128 ? SUM_CHANNELS : 128;

/// (Rows of 8-bit A, STEPS x 32 summed tokens) x transposed tiles, PRODUCT_CHANNELS columns of
/// products: those from PRODUCT_CHANNELS * part on. `tiles` holds the 64-token tiles of the group
/// one after the other. They are added to what there is if it `adds`.
template <bool SIGNED, int STEPS, typename Tiles>
__device__ __forceinline__ void issue_tokens(int (*products)[4], const u32 (&a)[STEPS][4],
                                             Tiles tiles, int part = 0, bool adds = false) {
  const u64 b =
      descriptor_of<TOKEN_ROW_BYTES>(tiles) + part * (PRODUCT_CHANNELS * TOKEN_ROW_BYTES / 16);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const u64 step_b = b + (step / 2 * (SUM_CHANNELS * TOKEN_ROW_BYTES) + step % 2 * 32) / 16;
    if constexpr (PRODUCT_CHANNELS == 128)
      wgmma_8_wide<SIGNED>(products, a[step], step_b, adds || step > 0);
    else
      wgmma_8<SIGNED>(products, a[step], step_b, adds || step > 0);
  }
  wgmma_commit();
}
/// sums += products, finished, times the row's scale: `low` (row g) or `high` (row g + 8).
template <int N>
__device__ __forceinline__ void add_scaled(float (*sums)[4], const int (*products)[4], float low,
                                           float high) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[j][i] = __fmaf_rn(static_cast<float>(products[j][i]), i < 2 ? low : high, sums[j][i]);
  }
}
/// Does so with the products of issue_tokens().
__device__ __forceinline__ void add_tokens(Sums& sums, const int (*products)[4], float low,
                                           float high, int part = 0) {
  add_scaled<PRODUCT_CHANNELS / 8>(&sums.x[part * (PRODUCT_CHANNELS / 8)], products, low, high);
  sums.bias[0] = sums.bias[1] = 0; // for ptxas to see that there is none
}

/// Gives what is added to the address of transposed tiles that are multiplied with.
__device__ __forceinline__ u32 token_lane() { return 0; }

/// Does so with accumulators of its own.
template <bool SIGNED, int STEPS, int CHANNELS = PRODUCT_CHANNELS> class TokenProducts {
public:
  static_assert(CHANNELS == PRODUCT_CHANNELS);
  template <typename Tiles>
  __device__ __forceinline__ void issue(const u32 (&a)[STEPS][4], Tiles tiles, int part = 0) {
    issue_tokens<SIGNED>(products_, a, tiles, part);
  }
  __device__ __forceinline__ void finish() { ::finish<0>(products_); }
  template <int PENDING>
  __device__ __forceinline__ void add_to(Sums& sums, float low, float high, int part = 0) {
    ::finish<PENDING>(products_);
    add_finished_to(sums, low, high, part);
  }
  __device__ __forceinline__ void add_finished_to(Sums& sums, float low, float high,
                                                  int part = 0) const {
    add_tokens(sums, products_, low, high, part);
  }

private:
  int products_[PRODUCT_CHANNELS / 8][4];
};

/// The accumulators of any product with 64 columns. Products that alternate in one block need no
/// more registers; in arrays of their own they would, whenever they live.
struct Block {
  int x[8][4];
  /// (Rows of 8-bit A, STEPS x 32 summed tokens) x channels 64 * part.. of transposed tiles.
  template <bool SIGNED, int STEPS, typename Tiles>
  __device__ __forceinline__ void issue(const u32 (&a)[STEPS][4], Tiles tiles, int part) {
    const u64 b = descriptor_of<TOKEN_ROW_BYTES>(tiles);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      wgmma_8<SIGNED>(x, a[step],
                      b + (step / 2 * (SUM_CHANNELS * TOKEN_ROW_BYTES) +
                           part * (64 * TOKEN_ROW_BYTES) + step % 2 * 32) /
                              16,
                      step > 0);
    wgmma_commit();
  }
  template <bool SIGNED, int PENDING>
  __device__ __forceinline__ void add_to(Sums& sums, float low, float high, int part) {
    finish<PENDING>(x);
    add_scaled<8>(&sums.x[8 * part], x, low, high);
  }
};

/// dP's are the bits of a float.
using ValueSum = int;
/// S and dP are formed in a block if they fit, else in an array of their own.
__device__ __forceinline__ auto score_sums(Block& block, int (&)[8][4]) -> int (&)[8][4] {
  return block.x;
}
__device__ __forceinline__ auto score_sums(Block&, float (&own)[8][4]) -> float (&)[8][4] {
  return own;
}
__device__ __forceinline__ auto value_sums(Block& block, float (&)[8][4]) -> int (&)[8][4] {
  return block.x;
}
/// The finished sums of dP.
template <int PENDING, int N>
__device__ __forceinline__ void finish_dp(float (&values)[N][4], int (&sums)[N][4]) {
  finish<PENDING>(sums);
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[j][i] = __int_as_float(sums[j][i]);
  }
}
/// Gives them too, with what they start from.
template <int PENDING, int N, typename Start>
__device__ __forceinline__ void finish_dp(float (&values)[N][4], int (&sums)[N][4],
                                          const Start& start) {
  finish<PENDING>(sums);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const Quad quad = start(j);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[j][i] = __int_as_float(sums[j][i]) + quad.x[i];
  }
}

/// sums += (rows of 16-bit A, STEPS x 16 summed tokens) x tiles, one after the other, of 16-bit
/// tokens by channels, as they lie in the caller's tensor: B with its columns contiguous.
template <int STEPS, typename Tiles>
__device__ __forceinline__ void issue_rows(Sums& sums, const u32 (&a)[STEPS][4], Tiles tiles) {
  constexpr int STEPS_A_TILE = TILE_ROWS / 16;
  const u64 b = descriptor_of<PITCH<SUM_ROW_BYTES>>(tiles);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int part = 0; part < SUM_CHANNELS / 64; ++part)
      wgmma_16_transposed<Element>(&sums.x[part * 8], a[step],
                                   b + (step / STEPS_A_TILE * (TILE_ROWS * SUM_ROW_BYTES) +
                                        part * PANEL_BYTES<SUM_ROW_BYTES> +
                                        step % STEPS_A_TILE * 16 * PITCH<SUM_ROW_BYTES>) /
                                           16,
                                   true);
  }
  wgmma_commit();
}
template <int PENDING> __device__ __forceinline__ void finish_rows(Sums& sums) {
  finish<PENDING>(sums.x);
}
