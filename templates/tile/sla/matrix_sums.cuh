//===- tile/sla/matrix_sums.cuh - Sums of matrices over blocks, with mma.sync ---===//
//
// A thread block takes 128 results by 128 columns, and goes over all blocks, a word of bits at a
// time, so that sums stay in FP32 until the end. With wgmma matrix_sums_wgmma.cuh stands in the
// place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/sla/summed_blocks.cuh"

constexpr SumsLayout LAYOUT(HEAD_DIM, false);
static_assert(LAYOUT.stages == 4 && LAYOUT.at_once == WORD_BITS && WARPS == 8);

// In a stage a block's columns are a row of 256 bytes in chunks of 16. Operand B's matrices take
// rows of the same last bit (Ones), so that chunks are swizzled by other bits than in other tiles.
constexpr int STAGE_ROW_BYTES = LAYOUT.columns * 2;
__device__ __forceinline__ int swizzle_of_row(int row) { return (row >> 1 & 3) | (row >> 1 & 4); }

/// How a thread copies a stage: a chunk of two rows.
struct StageCopies {
  const bf16* from; ///< the first block's chunk
  int row;
  u32 to;

  __device__ __forceinline__ StageCopies(const BlockSums& of, u32 base, int column)
      : row(threadIdx.x / 16) {
    const int chunk = threadIdx.x % 16;
    from = of.matrices + column + chunk * 8;
    to = base + row * STAGE_ROW_BYTES + ((chunk ^ swizzle_of_row(row)) << 4);
  }
  __device__ __forceinline__ void start(int stage, const SummedBlocks<1>& at) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of = row + 16 * i; // whose swizzle is the row's
      const bool valid = at.first + of < at.count;
      cp_async_16_or_zeros(to + stage * LAYOUT.stage_bytes + i * 16 * STAGE_ROW_BYTES,
                           valid ? from + (at.place() + of) * MATRIX_ELEMENTS : from, valid);
    }
  }
};

/// A warp's 32 results by 64 columns.
struct WarpSums {
  float x[2][4][2][4] = {};

  static __device__ __forceinline__ int first_row() { return warp_id() / 2 * 32; }
  static __device__ __forceinline__ int first_column() { return warp_id() % 2 * 64; }
  /// Where this lane's part of operand B lies in the first stage.
  static __device__ __forceinline__ u32 operand(u32 base) {
    const int matrix = lane_id() / 8, row = Ones::block_at(matrix % 2, lane_id() % 8);
    return base + row * STAGE_ROW_BYTES + first_column() * 2 +
           ((matrix / 2 ^ swizzle_of_row(row)) << 4);
  }
  /// Adds what a stage has. `listed`: of the result of this lane's number.
  __device__ __forceinline__ void add(u32 operand, u32 listed) {
    u32 a[2][2][4]; // of steps and 16 results
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Ones ones(__shfl_sync(~0u, listed, i * 8 + lane_id() / 4));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        a[s][i / 2][i % 2] = ones.low(s);
        a[s][i / 2][i % 2 + 2] = ones.high(s);
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 b[4];
        ldmatrix_x4_transposed(b, (operand ^ j << 5) + s * STAGE_ROW_BYTES);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          multiply(x[i][j], a[s][i], b);
      }
    }
  }
  /// Stores those of `results` results. `to`: the warp's first.
  __device__ __forceinline__ void store(bf16* to, int results) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = i * 16 + h * 8 + lane_id() / 4;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          u32 words[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float* of = &x[i][j + w / 2][w % 2][2 * h];
            words[w] = pack<bf16>(0.5f * of[0], 0.5f * of[1]);
          }
          gather_octet(words);
          if (row < results)
            store_words(to + static_cast<s64>(row) * MATRIX_ELEMENTS + j * 16 + lane_id() % 4 * 8,
                        words);
        }
      }
    }
  }
};

template <template <int> typename ListsOf>
__device__ __forceinline__ void sum_matrices(const Params& p, const KeyHead& at,
                                             const BlockSums& of, int first_result, int column,
                                             int /*run*/) {
  constexpr int AHEAD = LAYOUT.stages - 1;
  const u32 base = linear_base<LAYOUT.total>();
  const StageCopies copies(of, base, column);
  const int steps = of.steps<1>();
  SummedBlocks<1> copied(of), summed(of);
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage) {
    if (stage < steps)
      copies.start(stage, copied);
    copied.next();
    cp_async_commit();
  }
  const int first = first_result + WarpSums::first_row();
  const bool has_results = first < of.results; // others copy only
  using Lists = ListsOf<1>;
  const Lists lists(p, at, first);
  u32 word = has_results ? lists.read(summed) : 0;
  const u32 operand = WarpSums::operand(base);
  WarpSums sums;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<AHEAD - 1>();
    __syncthreads(); // this stage is there, and nobody reads the one before it
    if (step + AHEAD < steps)
      copies.start((step + AHEAD) % LAYOUT.stages, copied);
    copied.next();
    cp_async_commit();
    if (!has_results)
      continue;
    const u32 listed = Lists::of_result(word);
    summed.next();
    if (step + 1 < steps)
      word = lists.read(summed);
    sums.add(operand + step % LAYOUT.stages * LAYOUT.stage_bytes, listed);
  }
  if (has_results)
    sums.store(of.sums + static_cast<s64>(first) * MATRIX_ELEMENTS + column +
                   WarpSums::first_column(),
               of.results - first);
}
