//===- tile/sla/block_sums.cuh - Sums of matrices over the blocks that lists leave out ---===//
//
// The first thread blocks sum the vectors, in FP32, for they take longest. The others sum matrices.
// Blocks that read the same columns follow one another in the grid, so that a matrix comes from
// memory once.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/add_if.cuh"
#include "tile/sla/matrix_sums.cuh"

static_assert(WARPS / 2 * kSummedNorms * HEAD_DIM * 4 <= LAYOUT.total);

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
template <template <int> typename ListsOf>
__device__ __forceinline__ void sum_norms(const Params& p, const KeyHead& at, const BlockSums& of,
                                          int first_result) {
  LaneChannels sums[kSummedNorms] = {};
  const int beyond = first_result % WORD_BITS, own = lane_id() * (HEAD_DIM / 32);
  using Lists = ListsOf<1>;
  const Lists lists(p, at, first_result - beyond);
  const int steps = of.steps<1>();
  SummedBlocks<1> blocks(of);
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
      for (int r = 0; r < kSummedNorms; ++r)
        add_if(sums[r].x, more.x, results & 1u << r);
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
template <template <int> typename ListsOf>
__device__ __forceinline__ void sum_over_blocks(const Params& p, const KeyHead& at,
                                                const BlockSums& of) {
  const int of_norms = ceil_div(of.most_results, kSummedNorms), block = blockIdx.x - of_norms;
  if (block < 0) {
    const int first = blockIdx.x * kSummedNorms;
    if (first < of.results)
      sum_norms<ListsOf>(p, at, of, first);
    return;
  }
  const int tiles = ceil_div(of.most_results, LAYOUT.rows), runs = (gridDim.x - of_norms) / tiles;
  const int first = block % tiles * LAYOUT.rows, run = LAYOUT.tiles / runs;
  if (first < of.results)
    sum_matrices<ListsOf>(p, at, of, first, block / tiles * run * LAYOUT.columns, run);
}
