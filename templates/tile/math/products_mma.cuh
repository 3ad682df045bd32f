//===- tile/math/products_mma.cuh - Products of 16 rows a warp, with mma.sync ----===//
//
// The same names stand in products_wgmma.cuh, where products run asynchronously: issue_... starts
// one, finish waits for it. Here they are done when issue_... returns.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/mma.cuh"
#include "tile/math/accumulators.cuh"
#include "tile/math/magic_start.cuh"
#include "tile/memory/fragments.cuh"

/// Whether products run while their warps go on.
constexpr bool ASYNCHRONOUS = false;

constexpr int SCORE_STEPS = SCORE_ROW_BYTES / 32;
constexpr int VALUE_STEPS = VALUE_ROW_BYTES / 32;

/// S accumulates in FP32 or, for INT8, in INT32 from MAGIC_BITS, so that its bits are MAGIC + S and
/// one FFMA makes an exponent of them: value(sum) * scale - (ZERO * scale + subtrahend). The
/// addend's rounding is the same for all scores that share a scale, and less than one level of S.
struct IntegerScores {
  static_assert(QK16 || exact_with_magic(127, 127, HEAD_DIM));
  using Sum = int;
  static constexpr float ZERO = MAGIC;                  ///< value() of a score of 0
  static constexpr int LOWEST = MAGIC_BITS - (1 << 22); ///< below every score, with a value()
  static __device__ __forceinline__ void multiply(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  bool first) {
    if (first)
      mma_s8(d, a, b0, b1, MagicStart().bits);
    else
      mma_s8(d, a, b0, b1, d);
  }
  static __device__ __forceinline__ float value(int sum) { return __int_as_float(sum); }
  /// Integers and floats between 2^23 and 2^24 are in the same order.
  static __device__ __forceinline__ int maximum_of(int a, int b) { return maximum(a, b); }
};
struct FloatScores {
  using Sum = float;
  static constexpr float ZERO = 0;
  static constexpr float LOWEST = -3.0e38f;
  static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  bool first) {
    const float start[4] = {0, 0, 0, 0};
    if (first)
      mma_16<Element>(d, a, b0, b1, start);
    else
      mma_16<Element>(d, a, b0, b1, d);
  }
  static __device__ __forceinline__ float value(float sum) { return sum; }
  static __device__ __forceinline__ float maximum_of(float a, float b) { return max_number(a, b); }
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

/// s = rows of A x (rows of TILES tiles, one after the other)^T, for S.
template <int TILES = 1, typename Rows>
__device__ __forceinline__ void issue_scores(Scores::Sum (*s)[4], const Rows& rows, u32 tile) {
  const u32 address = tile + b_lane_offset<SCORE_ROW_BYTES>();
#pragma unroll
  for (int step = 0; step < SCORE_STEPS; ++step) {
    u32 a[4];
    rows.get(a, step);
#pragma unroll
    for (int pair = 0; pair < TILES * TILE_ROWS / 16; ++pair) {
      u32 b[4];
      load_fragment<SCORE_ROW_BYTES>(b, address, pair * 16, step);
      Scores::multiply(s[2 * pair], a, b[0], b[1], step == 0);
      Scores::multiply(s[2 * pair + 1], a, b[2], b[3], step == 0);
    }
  }
}

/// Does so for dP, in 16 bits, with COLUMNS rows of the tile. The sum of columns 8j..8j+7 starts
/// from start(j). A tile may hold the channels of STEPS steps alone, from step `first` on.
template <int COLUMNS = TILE_ROWS, int STEPS = VALUE_STEPS, typename Rows, typename Start>
__device__ __forceinline__ void issue_values(float (*s)[4], const Rows& rows, u32 tile,
                                             const Start& start, int first = 0) {
  const u32 address = tile + b_lane_offset<VALUE_ROW_BYTES>();
#pragma unroll VALUE_UNROLL
  for (int step = 0; step < STEPS; ++step) {
    u32 a[4];
    rows.get(a, first + step);
#pragma unroll
    for (int pair = 0; pair < COLUMNS / 16; ++pair) {
      u32 b[4];
      load_fragment<VALUE_ROW_BYTES>(b, address, pair * 16, step);
      if (first + step == 0) {
        mma_16<Element>(s[2 * pair], a, b[0], b[1], start(2 * pair).x);
        mma_16<Element>(s[2 * pair + 1], a, b[2], b[3], start(2 * pair + 1).x);
      } else {
        mma_16<Element>(s[2 * pair], a, b[0], b[1], s[2 * pair]);
        mma_16<Element>(s[2 * pair + 1], a, b[2], b[3], s[2 * pair + 1]);
      }
    }
  }
}

/// DP16: dP in FP16, of 8 N rows of a tile (tile/math/dp_sums16.cuh).
template <int N> struct HalfSums {
  u32 x[N][2];

  template <int STEPS = VALUE_STEPS, typename Rows>
  __device__ __forceinline__ void form(const Rows& rows, u32 tile, int first = 0) {
    const u32 address = tile + b_lane_offset<VALUE_ROW_BYTES>();
#pragma unroll VALUE_UNROLL
    for (int step = 0; step < STEPS; ++step) {
      u32 a[4];
      rows.get(a, first + step);
#pragma unroll
      for (int pair = 0; pair < N / 2; ++pair) {
        u32 b[4];
        load_fragment<VALUE_ROW_BYTES>(b, address, pair * 16, step);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32(&sum)[2] = x[2 * pair + half];
          if (first + step == 0)
            mma_16_half_sums(sum, a, b[2 * half], b[2 * half + 1], {0, 0});
          else
            mma_16_half_sums(sum, a, b[2 * half], b[2 * half + 1], sum);
        }
      }
    }
  }
  /// Gives dP - delta, by what rows g and g + 8 are multiplied with and what is added then.
  __device__ __forceinline__ void subtract_delta_of_rows(float (&dp)[N][4],
                                                         const float (&factor)[2],
                                                         const float (&addend)[2]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 sums = unpack<fp16>(x[j][r]);
        dp[j][2 * r] = __fmaf_rn(sums.x, factor[r], addend[r]);
        dp[j][2 * r + 1] = __fmaf_rn(sums.y, factor[r], addend[r]);
      }
    }
  }
  /// Does so by columns, whose factors and addends lie in shared memory in the order sigma.
  __device__ __forceinline__ void subtract_delta_of_columns(float (&dp)[N][4], u32 factors,
                                                            u32 addends) const {
#pragma unroll
    for (int j = 0; j < N; ++j)
      subtract_delta_of_columns(dp[j], j, factors, addends);
  }
  __device__ __forceinline__ void subtract_delta_of_columns(float (&dp)[4], int j, u32 factors,
                                                            u32 addends) const {
    const u32 columns = j / 2 * 64 + j % 2 * 8 + (lane_id() & 3) * 16;
    const float2 factor = read_float2(factors + columns), addend = read_float2(addends + columns);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 sums = unpack<fp16>(x[j][r]);
      dp[2 * r] = __fmaf_rn(sums.x, factor.x, addend.x);
      dp[2 * r + 1] = __fmaf_rn(sums.y, factor.y, addend.y);
    }
  }
};

template <int PENDING, typename Sum, int N> __device__ __forceinline__ void finish(Sum (&)[N][4]) {}
template <int PENDING, int N, typename Start>
__device__ __forceinline__ void finish_values(float (&)[N][4], const Start&) {}

/// Gives what is added to the address of transposed tiles that are multiplied with.
__device__ __forceinline__ u32 token_lane() { return b_lane_offset<TOKEN_ROW_BYTES>(); }

/// Channels of products that are formed at a time: here, as few as it takes.
constexpr int PRODUCT_CHANNELS = SUM_CHANNELS;

/// (Rows of 8-bit A, STEPS x 32 summed tokens) x transposed tiles. At `tiles`, less token_lane(),
/// lie the 64-token tiles of the group one after the other. Sums are formed 16 columns at a time,
/// when they are added. With fewer than all CHANNELS, those from CHANNELS * part on.
template <bool SIGNED, int STEPS, int CHANNELS = SUM_CHANNELS> class TokenProducts {
  static_assert(exact_with_magic(SIGNED ? 127 : 255, 127, STEPS * 32));

public:
  __device__ __forceinline__ void issue(const u32 (&a)[STEPS][4], u32 tiles, int part = 0) {
    address_ = tiles + part * (CHANNELS * TOKEN_ROW_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a_[step][i] = a[step][i];
    }
  }
  /// sums += products times the row's scale: `low` (row g) or `high` (row g + 8). Products start
  /// from MAGIC_BITS and are added with one FFMA as MAGIC + product; what they are too large by is
  /// the same for a whole row, its bias. Sums stay below 8 or so times MAGIC scales from one
  /// rescaling to the next, so that this costs a few levels' worth of one product, where rounding P
  /// or dS costs a hundred.
  template <int PENDING>
  __device__ __forceinline__ void add_to(Sums& sums, float low, float high, int part = 0) const {
    const MagicStart start;
#pragma unroll
    for (int pair = 0; pair < CHANNELS / 16; ++pair) {
      int products[2][4];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 b[4];
        load_fragment<TOKEN_ROW_BYTES>(b, address_ + step / 2 * (SUM_CHANNELS * TOKEN_ROW_BYTES),
                                       pair * 16, step % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (step == 0)
            multiply(products[half], a_[step], &b[2 * half], start.bits);
          else
            multiply(products[half], a_[step], &b[2 * half], products[half]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums.x[part * (CHANNELS / 8) + 2 * pair + half][i];
          sum = __fmaf_rn(__int_as_float(products[half][i]), i < 2 ? low : high, sum);
        }
      }
    }
    if (part == 0) { // of the whole row
      sums.bias[0] = __fmaf_rn(MAGIC, low, sums.bias[0]);
      sums.bias[1] = __fmaf_rn(MAGIC, high, sums.bias[1]);
    }
  }

private:
  static __device__ __forceinline__ void multiply(int (&d)[4], const u32 (&a)[4], const u32* b,
                                                  const int (&c)[4]) {
    if constexpr (SIGNED)
      mma_s8(d, a, b[0], b[1], c);
    else
      mma_u8(d, a, b[0], b[1], c);
  }

  u32 a_[STEPS][4];
  u32 address_;
};

/// Products with 64 channels, 64 * part.. of the transposed tiles, in the order of their issue.
struct Block {
  TokenProducts<false, TILE_ROWS / 32, 64> of_unsigned;
  TokenProducts<true, TILE_ROWS / 32, 64> of_signed;
  template <bool SIGNED>
  __device__ __forceinline__ void issue(const u32 (&a)[TILE_ROWS / 32][4], u32 tiles, int part) {
    if constexpr (SIGNED)
      of_signed.issue(a, tiles, part);
    else
      of_unsigned.issue(a, tiles, part);
  }
  template <bool SIGNED, int PENDING>
  __device__ __forceinline__ void add_to(Sums& sums, float low, float high, int part) const {
    if constexpr (SIGNED)
      of_signed.template add_to<PENDING>(sums, low, high, part);
    else
      of_unsigned.template add_to<PENDING>(sums, low, high, part);
  }
};

using ValueSum = float; ///< of dP
/// S and dP are formed in arrays of their own.
__device__ __forceinline__ auto score_sums(Block&, Scores::Sum (&own)[8][4])
    -> Scores::Sum (&)[8][4] {
  return own;
}
__device__ __forceinline__ auto value_sums(Block&, float (&own)[8][4]) -> float (&)[8][4] {
  return own;
}
template <int PENDING, typename Start>
__device__ __forceinline__ void finish_dp(float (&values)[8][4], float (&sums)[8][4],
                                          const Start&) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[j][i] = sums[j][i];
  }
}

/// sums += (rows of 16-bit A, STEPS x 16 summed tokens) x a tile of 16-bit tokens by channels, as
/// it lies in the caller's tensor.
template <int STEPS>
__device__ __forceinline__ void issue_rows(Sums& sums, const u32 (&a)[STEPS][4], u32 tile) {
  const int lane = lane_id();
  const u32 address =
      tile + chunk_offset<SUM_ROW_BYTES>((lane & 7) | (lane >> 3 & 1) << 3, lane >> 4);
  constexpr int PAIRS_A_PANEL = PITCH<SUM_ROW_BYTES> / 32;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int pair = 0; pair < SUM_CHANNELS / 16; ++pair) {
      u32 b[4];
      ldmatrix_x4_transposed(b, (address ^ (pair % PAIRS_A_PANEL << 5)) +
                                    pair / PAIRS_A_PANEL * PANEL_BYTES<SUM_ROW_BYTES> +
                                    row_offset<SUM_ROW_BYTES>(step * 16));
      mma_16<Element>(sums.x[2 * pair], a[step], b[0], b[1], sums.x[2 * pair]);
      mma_16<Element>(sums.x[2 * pair + 1], a[step], b[2], b[3], sums.x[2 * pair + 1]);
    }
  }
}
template <int PENDING> __device__ __forceinline__ void finish_rows(Sums&) {}
