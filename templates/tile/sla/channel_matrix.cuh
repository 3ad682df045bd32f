//===- tile/sla/channel_matrix.cuh - Tiles of tokens and matrices of channels ---===//
//
// Tiles and matrices lie in shared memory as tile/memory/swizzle.cuh says, 16 bits an element, a
// row of all channels per token or channel. A warp owns 16 tokens of a tile from WARP_ROWS of its
// number on.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/global_memory.cuh"
#include "tile/sla/features.cuh"

constexpr int WARP_ROWS = 16;
constexpr int OCTETS = HEAD_DIM / 8;     ///< of channels, 16 bytes each
constexpr int ROWS_A_TURN = 32 / OCTETS; ///< that a warp copies at once
constexpr int MATRIX_ELEMENTS = HEAD_DIM * HEAD_DIM;
static_assert(ROWS_A_TURN * OCTETS == 32, "heads of 64 or 128 channels");

template <typename T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;

/// Gives where the block's shared memory begins, of which its layout takes BYTES.
template <int BYTES> __device__ __forceinline__ u32 linear_base() {
  static_assert(BYTES == SHARED_BYTES, "the host has another layout");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  return static_cast<u32>(__cvta_generic_to_shared(shared_memory));
}

/// Starts copying a matrix of channels by channels.
__device__ __forceinline__ void load_matrix(u32 matrix, const bf16* from) {
  load_tile<HEAD_DIM, ROW_BYTES, THREADS>(matrix, from, ROW_BYTES, HEAD_DIM, HEAD_DIM);
}

/// Starts copying a vector of channels.
__device__ __forceinline__ void load_channels(u32 vector, const float* from) {
  load_floats<HEAD_DIM, THREADS>(vector, from);
}

// A lane's part of an address is formed where a product begins; formed once, it takes a register
// over the whole kernel.

/// Fragments of 16 rows and 16 columns of a tile or matrix, as they lie: operand A of products
/// along channels, or operand B, n8 tiles in r[0], r[1] and r[2], r[3], with rows as columns.
/// TRANSPOSED: operands of products along the rows, with columns as A's rows.
template <bool IS_A, bool TRANSPOSED> struct Fragments {
  u32 lane_address;
  __device__ __forceinline__ explicit Fragments(u32 tile)
      : lane_address(opaque(tile + (IS_A != TRANSPOSED ? a_lane_offset<ROW_BYTES>()
                                                       : b_lane_offset<ROW_BYTES>()))) {}
  __device__ __forceinline__ void load(u32 (&r)[4], int row, int column16) const {
    constexpr int STEPS_A_PANEL = PITCH<ROW_BYTES> / 32;
    if constexpr (TRANSPOSED)
      ldmatrix_x4_transposed(r, (lane_address ^ (column16 % STEPS_A_PANEL << 5)) +
                                    column16 / STEPS_A_PANEL * PANEL_BYTES<ROW_BYTES> +
                                    row_offset<ROW_BYTES>(row));
    else
      load_fragment<ROW_BYTES>(r, lane_address, row, column16);
  }
};
using RowsOfA = Fragments<true, false>;
using RowsOfB = Fragments<false, false>;
using ColumnsOfA = Fragments<true, true>;
using ColumnsOfB = Fragments<false, true>;

__device__ __forceinline__ void multiply(float (&sums)[2][4], const u32 (&a)[4],
                                         const u32 (&b)[4]) {
  mma_16<bf16>(sums[0], a, b[0], b[1], sums[0]);
  mma_16<bf16>(sums[1], a, b[2], b[3], sums[1]);
}

/// 16 columns of rows by a matrix.
__device__ __forceinline__ void product(float (&sums)[2][4], const Rows16& rows,
                                        const ColumnsOfB& matrix, int column16) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    u32 b[4];
    matrix.load(b, s * 16, column16);
    multiply(sums, rows.x[s], b);
  }
}
/// 32 columns, of rows of a tile by the transpose of a matrix.
__device__ __forceinline__ void product_of_transpose(float (&sums)[2][2][4], const RowsOfA& rows,
                                                     int row, const RowsOfB& matrix, int column16) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    u32 a[4], b[4];
    rows.load(a, row, s);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      matrix.load(b, (column16 + c) * 16, s);
      multiply(sums[c], a, b);
    }
  }
}

/// Fragments' words lie here in a tile or matrix: this lane's two channels of rows g and g + 8 from
/// `row`, a multiple of 16, on.
struct WordPlaces {
  u32 first;
  __device__ __forceinline__ WordPlaces(u32 tile, int row) {
    const int lane = lane_id();
    // For the compiler another number: else each place keeps a register over the whole kernel.
    first = opaque(tile + chunk_offset<ROW_BYTES>(row + lane / 4, 0) + lane % 4 * 4);
  }
  __device__ __forceinline__ u32 at(int half, int octet) const {
    constexpr int CHUNKS = CHUNKS_A_PANEL<ROW_BYTES>;
    return (first ^ (octet % CHUNKS << 4)) + octet / CHUNKS * PANEL_BYTES<ROW_BYTES> +
           half * 8 * PITCH<ROW_BYTES>;
  }
  __device__ __forceinline__ u32 of_word(int step, int word) const {
    return at(half_of_word(word), 2 * step + word / 2);
  }
};
__device__ __forceinline__ void write_rows(u32 tile, int row, const Rows16& rows) {
  const WordPlaces places(tile, row);
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int w = 0; w < 4; ++w)
      write_word(places.of_word(s, w), rows.x[s][w]);
  }
}

/// How a warp goes over its rows, 16 bytes a lane: this lane's octet, and its first row.
struct WarpRows {
  int octet, first;
  __device__ __forceinline__ WarpRows() {
    const int thread = reread_thread();
    octet = thread % OCTETS, first = thread % 32 / OCTETS;
  }
  __device__ __forceinline__ u32 place(int row) const {
    return chunk_offset<ROW_BYTES>(row, octet);
  }
};

/// Starts copying the warp's rows into its part of the tile; those past `valid_rows` become zeros.
__device__ __forceinline__ void load_own_rows(u32 tile, int row, const Element* from, s64 stride,
                                              int valid_rows) {
  const WarpRows own;
#pragma unroll
  for (int turn = 0; turn < WARP_ROWS; turn += ROWS_A_TURN) {
    const int of = row + own.first + turn;
    const bool valid = of < valid_rows;
    cp_async_16_or_zeros(tile + own.place(of), valid ? from + of * stride + own.octet * 8 : from,
                         valid);
  }
}

/// Sums of two octets, each element rounded once.
__device__ __forceinline__ void add_words(u32 (&x)[4], const uint4& more) {
  const u32 others[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack<Element>(x[i]), b = unpack<Element>(others[i]);
    x[i] = pack<Element>(a.x + b.x, a.y + b.y);
  }
}
/// Rows of another tensor, for the sums with what the warp stores; zeros if there is none.
/// All are read before any is stored, for they may be where the sums go.
struct OwnRows {
  uint4 x[WARP_ROWS / ROWS_A_TURN];
  __device__ __forceinline__ OwnRows(const Element* from, s64 stride, int row, int valid_rows) {
    const WarpRows own;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / ROWS_A_TURN; ++i) {
      const int of = row + own.first + i * ROWS_A_TURN;
      x[i] = make_uint4(0, 0, 0, 0);
      if (from != nullptr && of < valid_rows)
        x[i] = *reinterpret_cast<const uint4*>(from + of * stride + own.octet * 8);
    }
  }
};
/// Stores the warp's rows of a tile or, with others, the sums of both, each element rounded once.
template <typename... Others>
__device__ __forceinline__ void store_own_rows(u32 tile, int row, Element* to, s64 stride,
                                               int valid_rows, const Others&... others) {
  const WarpRows own;
#pragma unroll
  for (int i = 0; i < WARP_ROWS / ROWS_A_TURN; ++i) {
    const int of = row + own.first + i * ROWS_A_TURN;
    u32 words[4];
    read_words(words, tile + own.place(of));
    (add_words(words, others.x[i]), ...);
    if (of < valid_rows)
      store_words(to + of * stride + own.octet * 8, words);
  }
}

/// A row's words of four n8 tiles, two channels of each, become all channels of tile t of lane t of
/// the quad.
__device__ __forceinline__ void gather_octet(u32 (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane_id() & bit) != 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      u32 &low = x[bit == 1 ? 2 * j : j], &high = x[bit == 1 ? 2 * j + 1 : j + 2];
      const u32 got = __shfl_xor_sync(~0u, upper ? low : high, bit);
      (upper ? low : high) = got;
    }
  }
}

/// to[channel] = sum over the tile's rows of weight(row) times bf16 or Element T. All of the block
/// call it, behind a barrier; `scratch` takes two floats a thread.
template <typename T, int ROWS, typename Weight>
__device__ __forceinline__ void sum_columns(float* to, u32 tile, u32 scratch,
                                            const Weight& weight) {
  constexpr int PAIRS = HEAD_DIM / 2, PARTS = THREADS / PAIRS, EACH = ROWS / PARTS;
  const int pair = threadIdx.x % PAIRS, part = threadIdx.x / PAIRS;
  float sum[2] = {};
#pragma unroll 8
  for (int i = 0; i < EACH; ++i) {
    const int row = part * EACH + i;
    const float2 x =
        unpack<T>(read_word(tile + chunk_offset<ROW_BYTES>(row, pair / 4) + pair % 4 * 4));
    const float by = weight(row);
    sum[0] = __fmaf_rn(x.x, by, sum[0]);
    sum[1] = __fmaf_rn(x.y, by, sum[1]);
  }
  write_float2(scratch + (part * HEAD_DIM + pair * 2) * 4, sum);
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      total += read_float(scratch + (i * HEAD_DIM + threadIdx.x) * 4);
    to[threadIdx.x] = total;
  }
}

/// A tile of Element, of the caller's values, becomes one of bf16, which products take.
template <int TOKENS> __device__ __forceinline__ void make_bf16(u32 tile) {
  if constexpr (!IS_BF16<Element>) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TOKENS * OCTETS; i += THREADS) {
      const u32 place = tile + chunk_offset<ROW_BYTES>(i / OCTETS, i % OCTETS);
      u32 words[4];
      read_words(words, place);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = unpack<Element>(words[w]);
        words[w] = pack<bf16>(x.x, x.y);
      }
      write_words(place, words);
    }
    __syncthreads();
  }
}

/// The first token of this thread block, and how many it has.
template <int TOKENS> struct BlockOfTokens {
  int first, count;
  __device__ __forceinline__ explicit BlockOfTokens(int all)
      : first(blockIdx.x * TOKENS), count(minimum(TOKENS, all - first)) {}
  /// Starts copying the rows of a head that they have.
  __device__ __forceinline__ void load(u32 tile, const Element* head, s64 stride) const {
    load_tile<TOKENS, ROW_BYTES, THREADS>(tile, head + first * stride, stride * 2, count, HEAD_DIM);
  }
};
