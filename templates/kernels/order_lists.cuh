//===- kernels/order_lists.cuh - The order in which blocks of keys are begun -----===//
//
// Long lists of queries come first: a block that walks over one and begins last leaves the other
// multiprocessors without work. A list's level is the logarithm of its length in means, rounded
// down; the mean is the next integer above it. Keys that a causal mask hides count, too. Among
// lists of one level the order stays, so that neighbours read the same queries at the same time.
//
// One block does it all. Each thread has as many lists as the others, neighbours, and learns how
// many of each level the threads before have.
//
//===----------------------------------------------------------------------===//

#include "ptx/global_memory.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/list_bits.cuh"

constexpr int LEVELS = 8;
static_assert(WARPS == 32, "a lane has a warp's sum");

/// The sum of the warp's numbers up to this lane's.
template <typename Number> __device__ __forceinline__ Number sum_up_to(Number own) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Number other = __shfl_up_sync(~0u, own, distance);
    own += lane_id() >= distance ? other : 0;
  }
  return own;
}

/// For each of N numbers that all threads have, these are the sum and that of the threads before
/// this one.
template <typename Number, int N> struct SumsOfBlock {
  Number all[N], before[N];

  __device__ __forceinline__ explicit SumsOfBlock(const Number (&own)[N]) {
    static_assert(N <= WARPS, "a warp adds up the warps' sums of a number");
    __shared__ Number up_to_warp[N][WARPS];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      before[i] = sum_up_to(own[i]);
      if (lane_id() == 31)
        up_to_warp[i][warp_id()] = before[i];
      before[i] -= own[i];
    }
    __syncthreads();
    if (warp_id() < N)
      up_to_warp[warp_id()][lane_id()] = sum_up_to(up_to_warp[warp_id()][lane_id()]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      all[i] = up_to_warp[i][WARPS - 1];
      before[i] += warp_id() > 0 ? up_to_warp[i][warp_id() - 1] : 0;
    }
  }
};

/// How often a list's length can be halved, rounded down, before it is below the mean: the largest
/// level with length >= mean * 2^level, as the mean is an integer. Limits of 64 bits for each
/// level, which would be the same for all lists, take 16 registers for the whole kernel.
__device__ __forceinline__ int level_of(u32 length, u32 mean) {
  int level = 0;
#pragma unroll
  for (int higher = 1; higher < LEVELS; ++higher)
    level += length >> higher >= mean;
  return level;
}

/// Lists have numbers of 32 bits: a place of each takes 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 blocks = key_blocks(p), heads_kv = p.heads_kv;
  const u32 lists = p.sequences * heads_kv * blocks;
  const u32 each = (lists + THREADS - 1) / THREADS;
  const u32 begin = minimum(threadIdx.x * each, lists), end = minimum(begin + each, lists);

  u64 length[] = {0};
  for (u32 list = begin; list < end; ++list)
    length[0] += p.list_lengths[list];
  const u32 mean = static_cast<u32>(SumsOfBlock(length).all[0] / lists) + 1;

  u32 counts[LEVELS] = {};
  for (u32 list = begin; list < end; ++list) {
    const int own = level_of(p.list_lengths[list], mean);
#pragma unroll
    for (int level = 0; level < LEVELS; ++level)
      counts[level] += own == level;
  }
  const SumsOfBlock sums(counts);
  u32 places[LEVELS]; // of the thread's next list of a level
  u32 higher = 0;
#pragma unroll
  for (int level = LEVELS - 1; level >= 0; --level) {
    places[level] = higher + sums.before[level];
    higher += sums.all[level];
  }
  u32 block = begin % blocks, head = begin / blocks % heads_kv, batch = begin / blocks / heads_kv;
  for (u32 list = begin; list < end; ++list) {
    const int own = level_of(p.list_lengths[list], mean);
    u32 place = 0;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level)
      if (own == level)
        place = places[level]++;
    store_words(p.key_order + static_cast<u64>(place) * KEY_ORDER_WORDS, {block, head, batch, 0});
    if (++block == blocks) {
      block = 0, ++head;
      if (head == heads_kv)
        head = 0, ++batch;
    }
  }
}
