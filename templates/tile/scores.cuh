//===- tile/scores.cuh - Products of a warp's 16 rows with a tile -----------===//
//
// The score product S is INT8, or 16-bit under the plan qk16. Everything that differs is here: the
// element of its operands, its accumulator, the size of a row.
//
//===----------------------------------------------------------------------===//

constexpr int VALUE_ROW_BYTES = HEAD_DIM * 2; ///< a token of V or dO, 16-bit
constexpr int TOKEN_ROW_BYTES = TOKENS_PER_TILE; ///< a channel of a transposed tile, 8-bit
constexpr int SCORE_ROW_BYTES = QK16 ? HEAD_DIM * 2 : HEAD_DIM; ///< a token of Q or K for S
constexpr int SCORE_STEPS = SCORE_ROW_BYTES / 32;
constexpr int VALUE_STEPS = VALUE_ROW_BYTES / 32;

template <bool FLOATING> struct Accumulator {
  using type = int;
};
template <> struct Accumulator<true> {
  using type = float;
};
using ScoreSum = Accumulator<QK16>::type;

__device__ __forceinline__ void mma_scores(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_s8(d, a, b0, b1);
}
__device__ __forceinline__ void mma_scores(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_16<Element>(d, a, b0, b1);
}

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
    address = tile + a_lane_offset<ROW_BYTES>() + row * ROW_BYTES;
  }
  __device__ __forceinline__ void get(u32 (&fragment)[4], int step) const {
    load_fragment<ROW_BYTES>(fragment, address, 0, step);
  }
};

/// s += rows of A x (8 * COLUMNS8 rows of the tile)^T, for S.
template <int COLUMNS8, typename Rows>
__device__ __forceinline__ void multiply_scores(ScoreSum (&s)[COLUMNS8][4], const Rows& rows,
                                                u32 tile) {
  const u32 address = tile + b_lane_offset<SCORE_ROW_BYTES>();
#pragma unroll
  for (int step = 0; step < SCORE_STEPS; ++step) {
    u32 a[4];
    rows.get(a, step);
#pragma unroll
    for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
      u32 b[4];
      load_fragment<SCORE_ROW_BYTES>(b, address, pair * 16, step);
      mma_scores(s[2 * pair], a, b[0], b[1]);
      mma_scores(s[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

/// The same for dP, in 16 bits.
template <int COLUMNS8, typename Rows>
__device__ __forceinline__ void multiply_values(float (&s)[COLUMNS8][4], const Rows& rows,
                                                u32 tile) {
  const u32 address = tile + b_lane_offset<VALUE_ROW_BYTES>();
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step) {
    u32 a[4];
    rows.get(a, step);
#pragma unroll
    for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
      u32 b[4];
      load_fragment<VALUE_ROW_BYTES>(b, address, pair * 16, step);
      mma_16<Element>(s[2 * pair], a, b[0], b[1]);
      mma_16<Element>(s[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

/// sum += (rows of 8-bit A, STEPS x 32 summed tokens) x transposed tiles, dequantised: column c of
/// row r by step_of_column[c] * step_low or step_high. `tiles` holds the 64-token tiles of the
/// group one after the other, `column_steps` their HEAD_DIM steps.
template <bool SIGNED, int STEPS>
__device__ __forceinline__ void multiply_tokens(float (&sum)[HEAD_DIM / 8][4],
                                                const u32 (&a)[STEPS][4], u32 tiles,
                                                u32 column_steps, float step_low,
                                                float step_high) {
  const u32 address = tiles + b_lane_offset<TOKEN_ROW_BYTES>();
  const u32 column_address = column_steps + (lane_id() & 3) * 8;
#pragma unroll
  for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
    int products[2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 b[4];
      load_fragment<TOKEN_ROW_BYTES>(b, address + (step / 2) * HEAD_DIM * TOKENS_PER_TILE,
                                     pair * 16, step % 2);
      if constexpr (SIGNED) {
        mma_s8(products[0], a[step], b[0], b[1]);
        mma_s8(products[1], a[step], b[2], b[3]);
      } else {
        mma_u8(products[0], a[step], b[0], b[1]);
        mma_u8(products[1], a[step], b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 column = read_float2(column_address + (2 * pair + half) * 32);
      float(&total)[4] = sum[2 * pair + half];
      const int(&product)[4] = products[half];
      total[0] += static_cast<float>(product[0]) * (column.x * step_low);
      total[1] += static_cast<float>(product[1]) * (column.y * step_low);
      total[2] += static_cast<float>(product[2]) * (column.x * step_high);
      total[3] += static_cast<float>(product[3]) * (column.y * step_high);
    }
  }
}

/// Writes a warp's 16 x HEAD_DIM accumulators as rows of a 16-bit tensor; rows at or past
/// `valid_rows` are not touched.
__device__ __forceinline__ void store_rows(Element* rows, s64 stride, int valid_rows,
                                           const float (&x)[HEAD_DIM / 8][4], float factor_low,
                                           float factor_high) {
  const int row = lane_id() >> 2, column = (lane_id() & 3) * 2;
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 8; ++j) {
    if (row < valid_rows)
      *reinterpret_cast<u32*>(rows + row * stride + 8 * j + column) =
          pack<Element>(x[j][0] * factor_low, x[j][1] * factor_low);
    if (row + 8 < valid_rows)
      *reinterpret_cast<u32*>(rows + (row + 8) * stride + 8 * j + column) =
          pack<Element>(x[j][2] * factor_high, x[j][3] * factor_high);
  }
}
