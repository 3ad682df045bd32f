//===- kernels/pool_blocks.cuh - Sums of blocks of queries and of keys -------===//
//
// For the means by which SLA2's router compares blocks: query_block_sums is (batch, head, block of
// SPARSE_Q queries, channel), key_block_sums the same of the keys. A block that is short has the
// sum of its tokens. Reads Q and K once, in words of 16 bytes, and adds in an order that is always
// the same: a thread its own tokens, then one thread per channel what the threads have.
//
//===----------------------------------------------------------------------===//

#include "ptx/convert.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/channels.cuh"
#include "tile/walk/list_bits.cuh"

constexpr int OCTETS = HEAD_DIM / 8;
constexpr int TOKENS_AT_ONCE = THREADS / OCTETS;
using SumsOfThreads = float[TOKENS_AT_ONCE][HEAD_DIM];
constexpr int minimum_of(int a, int b) { return a < b ? a : b; }

/// Adds up `count` tokens, at most SIZE, of which `first` is the first.
template <int SIZE>
__device__ __forceinline__ void add_block(SumsOfThreads& sums, const Element* first, s64 stride,
                                          int count, int channels, float* result) {
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  float sum[8] = {};
  if (is_channel(octet * 8, channels)) {
    constexpr int TURNS = SIZE / TOKENS_AT_ONCE, LOADS = minimum_of(TURNS, 8);
    for (int turn = 0; turn < TURNS; turn += LOADS) {
      uint4 words[LOADS]; // no load has a condition, so that several are under way
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int token = minimum(row + (turn + i) * TOKENS_AT_ONCE, count - 1);
        words[i] = *reinterpret_cast<const uint4*>(first + token * stride + octet * 8);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const bool counts = row + (turn + i) * TOKENS_AT_ONCE < count;
        const u32 pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 x = unpack<Element>(counts ? pairs[w] : 0);
          sum[2 * w] += x.x;
          sum[2 * w + 1] += x.y;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sums[row][octet * 8 + i] = sum[i];
  __syncthreads();
  if (const int channel = threadIdx.x; channel < HEAD_DIM && is_channel(channel, channels)) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < TOKENS_AT_ONCE; ++r)
      total += sums[r][channel];
    result[channel] = total;
  }
}

/// Block (block of queries of all heads and sequences, behind them those of keys).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  __shared__ SumsOfThreads sums;
  begin_in_stream_order();
  const u32 of_queries = static_cast<u32>(p.sequences) * p.heads * query_blocks(p);
  if (blockIdx.x < of_queries) {
    const u32 head = blockIdx.x / query_blocks(p);
    const int token = blockIdx.x % query_blocks(p) * SPARSE_Q;
    const Element* queries =
        p.q + head / p.heads * p.q_stride_b + head % p.heads * p.q_stride_h + token * p.q_stride_s;
    add_block<SPARSE_Q>(sums, queries, p.q_stride_s, minimum(SPARSE_Q, p.seq_q - token), p.channels,
                        p.query_block_sums + static_cast<s64>(blockIdx.x) * p.channels);
  } else {
    const u32 place = blockIdx.x - of_queries, head = place / key_blocks(p);
    const int token = place % key_blocks(p) * SPARSE_KV;
    const Element* keys = p.k + head / p.heads_kv * p.k_stride_b +
                          head % p.heads_kv * p.k_stride_h + token * p.k_stride_s;
    add_block<SPARSE_KV>(sums, keys, p.k_stride_s, minimum(SPARSE_KV, p.seq_kv - token), p.channels,
                         p.key_block_sums + static_cast<s64>(place) * p.channels);
  }
}
