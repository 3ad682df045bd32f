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

/// Vectors that meet the columns of accumulators lie in the order sigma too: one 16-byte read then
/// gives a thread its four columns of a pair of n8 tiles: 2t, 2t+1 of the first and of the second.
__device__ __forceinline__ float4 read_columns(u32 vector, int pair) {
  return read_float4(vector + pair * 64 + (lane_id() & 3) * 16);
}

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
  /// sum * step in one instruction. Exact but for the last rounding: key steps have 22 bits, so
  /// that MAGIC * step is exact.
  static __device__ __forceinline__ float scaled(int sum, float step) {
    return __fmaf_rn(__int_as_float(sum), step, -MAGIC * step);
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
template <bool FLOATING> struct ScoresOf {
  using type = IntegerScores;
};
template <> struct ScoresOf<true> {
  using type = FloatScores;
};
using Scores = ScoresOf<QK16>::type;

/// Four accumulators of one n8 tile, as a value.
struct Quad {
  float x[4];
};

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

/// s = rows of A x (8 * COLUMNS8 rows of the tile)^T, for S.
template <int COLUMNS8, typename Rows>
__device__ __forceinline__ void multiply_scores(Scores::Sum (&s)[COLUMNS8][4], const Rows& rows,
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
      Scores::multiply(s[2 * pair], a, b[0], b[1], step == 0);
      Scores::multiply(s[2 * pair + 1], a, b[2], b[3], step == 0);
    }
  }
}

/// The same times the steps of the tile's rows (in the order sigma): what is left is A's steps.
template <int COLUMNS8, typename Rows>
__device__ __forceinline__ void score_tile(float (&x)[COLUMNS8][4], const Rows& rows, u32 tile,
                                           u32 column_steps) {
  Scores::Sum sums[COLUMNS8][4];
  multiply_scores<COLUMNS8>(sums, rows, tile);
#pragma unroll
  for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
    const float4 columns = QK16 ? float4{} : read_columns(column_steps, pair);
    const float step[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[2 * pair + half][i] =
            Scores::scaled(sums[2 * pair + half][i], step[2 * half + (i & 1)]);
    }
  }
}

/// Rows of A x (8 * COLUMNS8 rows of the tile)^T for dP, in 16 bits. The sum of columns 8j..8j+7
/// starts from start(j).
template <int COLUMNS8, typename Rows, typename Start>
__device__ __forceinline__ void multiply_values(float (&s)[COLUMNS8][4], const Rows& rows, u32 tile,
                                                const Start& start) {
  const u32 address = tile + b_lane_offset<VALUE_ROW_BYTES>();
#pragma unroll
  for (int step = 0; step < VALUE_STEPS; ++step) {
    u32 a[4];
    rows.get(a, step);
#pragma unroll
    for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
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

/// sum += (rows of 8-bit A, STEPS x 32 summed tokens) x transposed tiles, dequantised by the column's
/// step times the row's, `step_low` (row g) or `step_high` (row g + 8). `tiles` holds the 64-token tiles of the
/// group one after the other, `column_steps` their HEAD_DIM steps.
template <bool SIGNED, int STEPS>
__device__ __forceinline__ void multiply_tokens(float (&sum)[HEAD_DIM / 8][4],
                                                const u32 (&a)[STEPS][4], u32 tiles,
                                                u32 column_steps, float step_low,
                                                float step_high) {
  const u32 address = tiles + b_lane_offset<TOKEN_ROW_BYTES>();
#pragma unroll
  for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
    int products[2][4] = {{MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS},
                          {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS}};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 b[4];
      load_fragment<TOKEN_ROW_BYTES>(b, address + (step / 2) * HEAD_DIM * TOKENS_PER_TILE,
                                     pair * 16, step % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (SIGNED)
          mma_s8(products[half], a[step], b[2 * half], b[2 * half + 1], products[half]);
        else
          mma_u8(products[half], a[step], b[2 * half], b[2 * half + 1], products[half]);
      }
    }
    const float4 columns = read_columns(column_steps, pair);
    const float column_step[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float product = __int_as_float(products[half][i]) - MAGIC;
        const float step = column_step[2 * half + (i & 1)] * (i < 2 ? step_low : step_high);
        sum[2 * pair + half][i] = __fmaf_rn(product, step, sum[2 * pair + half][i]);
      }
    }
  }
}

/// One of a query's row vectors in global memory.
__device__ __forceinline__ float read_row(const float* q_rows, s64 first_row, int query,
                                          int vector) {
  const s64 tile = (first_row + query) / TOKENS_PER_TILE;
  return q_rows[(tile * ROW_VECTORS + vector) * TOKENS_PER_TILE +
                sigma_slot(query % TOKENS_PER_TILE)];
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
