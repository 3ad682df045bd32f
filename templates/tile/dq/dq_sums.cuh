//===- tile/dq/dq_sums.cuh - dQ, summed in memory by blocks that own keys ------===//
//
// A block that owns keys has dS^T of 64 queries in its warps' accumulators, 16 keys a warp. dQ sums
// over keys: those of the block through shared memory, where each warp takes 16 queries and its
// part of the channels, and over blocks in global memory, in FP32 and in whatever order they come.
// Here dS and K have 16 bits; tile/dq/dq_sums8.cuh has them in 8.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/reduce.cuh"
#include "tile/dq/dq_layout.cuh"
#include "tile/math/products.cuh"

/// Which of the 64 queries' sums are this warp's.
struct DqShare {
  static constexpr int ROW_GROUPS = TOKENS_PER_TILE / DQ_ROWS;
  static constexpr int CHANNELS = HEAD_DIM * ROW_GROUPS / WARPS;
  int first_row, first_channel;
  __device__ __forceinline__ DqShare()
      : first_row(warp_id() % ROW_GROUPS * DQ_ROWS),
        first_channel(warp_id() / ROW_GROUPS * CHANNELS) {}
};

/// Adds a warp's accumulators of consecutive n8 tiles of channels to the sums of its 16 queries.
template <int N8>
__device__ __forceinline__ void add_to_memory(float* sums, int first_channel,
                                              const float (&x)[N8][4]) {
  float* to = sums + dq_place(first_channel / 8);
#pragma unroll
  for (int j = 0; j < N8; ++j) {
#if __CUDA_ARCH__ >= 900
    reduce_add_4(to + j * (DQ_ROWS * 8), x[j]);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
      reduce_add(to + j * (DQ_ROWS * 8) + i * DQ_STRIDE, x[j][i]);
#endif
  }
}

/// dS^T in 16 bits, as pack_fragments() has left it, to the rows of the warp's keys: [key][query].
__device__ __forceinline__ void write_score_gradients(u32 tile, const u32 (&ds)[4][4]) {
  constexpr int ROW_BYTES = TOKENS_PER_TILE * 2;
  const u32 row = tile + row_offset<ROW_BYTES>(warp_id() * 16 + lane_id() / 4);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * step + i / 2;
      write_word(row + i % 2 * (8 * ROW_BYTES) + ((chunk ^ lane_id() / 4) << 4) +
                     (lane_id() & 3) * 4,
                 ds[step][i]);
    }
  }
}

/// dQ's part of 64 queries and the block's keys: dS, of which `tile` holds the transpose, times the
/// keys' rows, added to the sums of the 64 queries.
template <int KEYS> __device__ __forceinline__ void add_to_dq(float* sums, u32 tile, u32 key_rows) {
  constexpr int DS_ROW_BYTES = TOKENS_PER_TILE * 2;
  constexpr int PART = DqShare::CHANNELS < 64 ? DqShare::CHANNELS : 64; ///< channels at a time
  const int lane = lane_id();
  const DqShare own;

  // Each 8 x 8 matrix is transposed on its way: A's rows are queries, B's are channels.
  const u32 ds = tile + chunk_offset<DS_ROW_BYTES>((lane & 7) | (lane >> 4) << 3,
                                                   own.first_row / 8 + (lane >> 3 & 1));
#pragma unroll
  for (int part = 0; part < DqShare::CHANNELS; part += PART) {
    const int first_channel = own.first_channel + part;
    float x[PART / 8][4] = {};
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      u32 a[4];
      ldmatrix_x4_transposed(a, ds + row_offset<DS_ROW_BYTES>(step * 16));
#pragma unroll
      for (int pair = 0; pair < PART / 16; ++pair) {
        u32 b[4];
        const int chunk = first_channel / 8 + 2 * pair + (lane >> 4);
        ldmatrix_x4_transposed(
            b, key_rows + row_offset<VALUE_ROW_BYTES>(step * 16) +
                   chunk_offset<VALUE_ROW_BYTES>((lane & 7) | (lane >> 3 & 1) << 3, chunk));
        mma_16<Element>(x[2 * pair], a, b[0], b[1], x[2 * pair]);
        mma_16<Element>(x[2 * pair + 1], a, b[2], b[3], x[2 * pair + 1]);
      }
    }
    add_to_memory(sums + own.first_row * HEAD_DIM, first_channel, x);
  }
}
