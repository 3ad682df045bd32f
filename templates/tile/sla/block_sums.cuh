//===- tile/sla/block_sums.cuh - Sums of matrices over the blocks that lists leave out ---===//
//
// Results are a product: a row of zeros and ones for each, by the blocks' matrices, each of which
// is a row of channels by channels. A thread block takes kSummedRows results by kSummedColumns
// columns, and goes over all blocks, a word of bits at a time, so that sums stay in FP32 until the
// end. The rows of zeros and ones are made from bits in registers; instead of a one there is a 2,
// whose bf16 is a single byte that is not 0, and sums are halved at the end, which is exact. Other
// thread blocks sum the vectors, in FP32: these are the first to begin, for they take longest.
//
// Blocks that read the same columns follow one another in the grid, so that a matrix comes from
// memory once.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "layouts/linear.cuh"
#include "tile/sla/channel_matrix.cuh"
#include "tile/walk/list_bits.cuh"

constexpr SumsLayout LAYOUT(HEAD_DIM);
static_assert(LAYOUT.stages == 4 && kSummedAtOnce == WORD_BITS && WARPS == 8);
static_assert(WARPS / 2 * kSummedNorms * HEAD_DIM * 4 <= LAYOUT.total);

/// What is summed and where sums go, of one head of keys.
struct BlockSums {
  const bf16* matrices;
  const float* norms;
  bf16* sums;
  float* norm_sums;
  int heads, count; ///< of blocks that are summed: they lie head by head
  int results;

  /// A step takes WORD_BITS blocks of a head; the last of a head may have fewer.
  __device__ __forceinline__ int steps() const { return heads * ceil_div(count, WORD_BITS); }
};

/// The blocks of a step.
struct SummedBlocks {
  int head = 0, first = 0;
  const int count; ///< of a head

  __device__ __forceinline__ explicit SummedBlocks(const BlockSums& of) : count(of.count) {}
  __device__ __forceinline__ void next() {
    first += WORD_BITS;
    if (first >= count)
      first = 0, ++head;
  }
  __device__ __forceinline__ s64 place() const { return static_cast<s64>(head) * count + first; }
};

// In a stage a block's columns are a row of 256 bytes in chunks of 16. Operand B's matrices take
// rows of the same last bit (Ones), so that chunks are swizzled by other bits than in other tiles.
constexpr int STAGE_ROW_BYTES = kSummedColumns * 2;
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
  __device__ __forceinline__ void start(int stage, const SummedBlocks& at) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of = row + 16 * i; // whose swizzle is the row's
      const bool valid = at.first + of < at.count;
      cp_async_16_or_zeros(to + stage * LAYOUT.stage_bytes + i * 16 * STAGE_ROW_BYTES,
                           valid ? from + (at.place() + of) * MATRIX_ELEMENTS : from, valid);
    }
  }
};

/// Operand A of a row's 32 blocks, a 2 where one is left out, in two steps of 16. Place 2 t + e of
/// half h of step s stands for block 16 h + 8 e + 2 t + s: so the blocks of a register are the same
/// bit of neighbouring bytes.
struct Ones {
  u32 twos[2]; ///< the high byte of a 2 for each byte of the word and each step

  __device__ __forceinline__ explicit Ones(u32 listed) {
    const u32 left_out = ~(listed << (6 - lane_id() % 4 * 2));
    twos[0] = left_out & 0x40404040u;
    twos[1] = left_out >> 1 & 0x40404040u;
  }
  __device__ __forceinline__ u32 low(int step) const { return __byte_perm(twos[step], 0, 0x1404); }
  __device__ __forceinline__ u32 high(int step) const { return __byte_perm(twos[step], 0, 0x3424); }
  /// The block at a place of a half, in step 0; in step 1 it is the next one.
  static __device__ __forceinline__ int block_at(int half, int place) {
    return half * 16 + place % 2 * 8 + place / 2 * 2;
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

template <typename Lists>
__device__ __forceinline__ void sum_matrices(const Params& p, const KeyHead& at,
                                             const BlockSums& of, int first_result, int column) {
  constexpr int AHEAD = LAYOUT.stages - 1;
  const u32 base = linear_base<LAYOUT.total>();
  const StageCopies copies(of, base, column);
  const int steps = of.steps();
  SummedBlocks copied(of), summed(of);
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage) {
    if (stage < steps)
      copies.start(stage, copied);
    copied.next();
    cp_async_commit();
  }
  const int first = first_result + WarpSums::first_row();
  const bool has_results = first < of.results; // others copy only
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

/// The channels of a vector that a lane has.
struct alignas(HEAD_DIM / 32 * 4) LaneChannels {
  float x[HEAD_DIM / 32];
  __device__ __forceinline__ void add(const LaneChannels& other) {
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c)
      x[c] += other.x[c];
  }
};

/// Sums the vectors of kSummedNorms results. Each warp takes some of the steps.
template <typename Lists>
__device__ __forceinline__ void sum_norms(const Params& p, const KeyHead& at, const BlockSums& of,
                                          int first_result) {
  LaneChannels sums[kSummedNorms] = {};
  const int beyond = first_result % WORD_BITS, own = lane_id() * (HEAD_DIM / 32);
  const Lists lists(p, at, first_result - beyond);
  const int steps = of.steps();
  SummedBlocks blocks(of);
#pragma unroll 1
  for (int step = 0; step < steps; ++step, blocks.next()) {
    if (step % WARPS != warp_id())
      continue;
    const u32 left_out = ~Lists::of_result(lists.read(blocks));
    const float* from = of.norms + blocks.place() * HEAD_DIM + own;
    const int count = minimum(WORD_BITS, blocks.count - blocks.first);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const LaneChannels more = *reinterpret_cast<const LaneChannels*>(from + i * HEAD_DIM);
      const u32 results = __ballot_sync(~0u, (left_out >> i & 1) != 0) >> beyond;
#pragma unroll
      for (int r = 0; r < kSummedNorms; ++r) {
        if (results >> r & 1)
          sums[r].add(more);
      }
    }
  }
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  LaneChannels* others = reinterpret_cast<LaneChannels*>(shared_memory) + lane_id();
  constexpr int OF_A_WARP = kSummedNorms * 32;
#pragma unroll 1
  for (int half = WARPS / 2; half > 0; half /= 2) {
    if (warp_id() >= half && warp_id() < 2 * half) {
#pragma unroll
      for (int r = 0; r < kSummedNorms; ++r)
        others[(warp_id() - half) * OF_A_WARP + r * 32] = sums[r];
    }
    __syncthreads();
    if (warp_id() < half) {
#pragma unroll
      for (int r = 0; r < kSummedNorms; ++r)
        sums[r].add(others[warp_id() * OF_A_WARP + r * 32]);
    }
    __syncthreads();
  }
  if (warp_id() > 0)
    return;
  float* to = of.norm_sums + static_cast<s64>(first_result) * HEAD_DIM + own;
#pragma unroll
  for (int r = 0; r < kSummedNorms; ++r) {
    if (first_result + r < of.results)
      *reinterpret_cast<LaneChannels*>(to + r * HEAD_DIM) = sums[r];
  }
}

/// All of a thread block's work.
template <typename Lists>
__device__ __forceinline__ void sum_over_blocks(const Params& p, const KeyHead& at,
                                                const BlockSums& of) {
  const int tiles = gridDim.x / LAYOUT.parts, part = blockIdx.x / tiles;
  const int first = blockIdx.x % tiles * kSummedRows;
  const int first_of_norms = first + part * kSummedNorms;
  if (part >= LAYOUT.norm_parts && first < of.results)
    sum_matrices<Lists>(p, at, of, first, (part - LAYOUT.norm_parts) * kSummedColumns);
  if (part < LAYOUT.norm_parts && first_of_norms < of.results)
    sum_norms<Lists>(p, at, of, first_of_norms);
}
