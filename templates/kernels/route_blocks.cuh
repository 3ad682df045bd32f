//===- kernels/route_blocks.cuh - Lists of the best blocks, from sums of blocks ---===//
//
// SLA2's router scores a block of queries with mean q and one of keys with mean k by (Wq q) . (Wk
// k), where a map W is the identity if it is null. That is y . k for y = Wk^T Wq q, which a block
// forms for some rows, the blocks of queries of a head. Scores stay in shared memory, where warps
// make the rows' lists of them (tile/sla/best_blocks.cuh). All is FP32.
//
// What scales a row, or is added to all of it, changes no list: sums take the place of means,
// except of a last block of keys that is short, which is scaled up. From each key a mean of some
// keys is subtracted, so that what all keys share takes no digits from a score.
//
// A thread sums its scores over all channels, in their order, so that equal keys have equal scores
// wherever they lie. It reads its keys itself: no other warp reads them.
//
//===----------------------------------------------------------------------===//

#include "layouts/route.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/best_blocks.cuh"

constexpr RouteLayout LAYOUT;
constexpr int MEAN_OF = 32;         ///< keys whose mean is subtracted
constexpr int ROWS_OF_A_THREAD = 8; ///< with two rows in a block or more, every second or further

/// The keys of a product: rows of a matrix in device memory.
struct Keys {
  const float* first;
  int count, channels;
  const float* reference; ///< is subtracted; null: nothing
  float scale_of_last;

  __device__ __forceinline__ void load(float4 (&to)[2], int key, int channel) const {
    const float4* from =
        reinterpret_cast<const float4*>(first + static_cast<s64>(key) * channels + channel);
    to[0] = __ldg(from), to[1] = __ldg(from + 1);
  }
};

__device__ __forceinline__ float scaled(float x, float scale, float less) {
  return __fmaf_rn(x, scale, -less);
}
__device__ __forceinline__ float4 scaled(float4 x, float scale, float4 less) {
  return {scaled(x.x, scale, less.x), scaled(x.y, scale, less.y), scaled(x.z, scale, less.z),
          scaled(x.w, scale, less.w)};
}
__device__ __forceinline__ float dot(float4 x, float4 y, float sum) {
  return __fmaf_rn(x.w, y.w, __fmaf_rn(x.z, y.z, __fmaf_rn(x.y, y.y, __fmaf_rn(x.x, y.x, sum))));
}
__device__ __forceinline__ float4 float4_at(const float* place) {
  return *reinterpret_cast<const float4*>(place);
}

/// results[row][key] = vectors[row] . key, with `stride` floats from row to row of the results. A
/// thread has KEYS keys at a time.
template <int ROWS, int KEYS, bool CENTRED>
__device__ __forceinline__ void multiply(float* results, int stride, const float* vectors,
                                         const Keys& keys) {
  constexpr int PARTS = ROWS / ROWS_OF_A_THREAD, LANES = 32 / PARTS;
  constexpr int KEYS_OF_WARP = KEYS * LANES;
  const int part = lane_id() / LANES;
  for (int from = warp_id() * KEYS_OF_WARP; from < keys.count; from += WARPS * KEYS_OF_WARP) {
    int key[KEYS];
    float scale[KEYS], sums[ROWS_OF_A_THREAD][KEYS] = {};
    float4 next[KEYS][2];
#pragma unroll
    for (int k = 0; k < KEYS; ++k) {
      key[k] = minimum(from + k * LANES + lane_id() % LANES, keys.count - 1);
      scale[k] = key[k] == keys.count - 1 ? keys.scale_of_last : 1;
      keys.load(next[k], key[k], 0);
    }
#pragma unroll 1
    for (int c = 0; c < keys.channels; c += 8) {
      float4 now[KEYS][2];
#pragma unroll
      for (int k = 0; k < KEYS; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          now[k][half] =
              CENTRED ? scaled(next[k][half], scale[k], float4_at(keys.reference + c + 4 * half))
                      : next[k][half];
      if (c + 8 < keys.channels)
#pragma unroll
        for (int k = 0; k < KEYS; ++k)
          keys.load(next[k], key[k], c + 8);
#pragma unroll
      for (int r = 0; r < ROWS_OF_A_THREAD; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 of_row = float4_at(vectors + (r * PARTS + part) * LAYOUT.row + c + 4 * half);
#pragma unroll
          for (int k = 0; k < KEYS; ++k)
            sums[r][k] = dot(of_row, now[k][half], sums[r][k]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS_OF_A_THREAD; ++r)
#pragma unroll
      for (int k = 0; k < KEYS; ++k) // threads with one key too many have the last one's number
        results[(r * PARTS + part) * stride + key[k]] = sums[r][k];
  }
}

/// results[row] = map^T vectors[row]. A thread has a channel.
template <int ROWS>
__device__ __forceinline__ void multiply_transposed(float* results, const float* vectors,
                                                    const float* map, int channels) {
  for (int task = threadIdx.x; task < ROWS / ROWS_OF_A_THREAD * channels; task += THREADS) {
    const int channel = task % channels, first = task / channels * ROWS_OF_A_THREAD;
    float sums[ROWS_OF_A_THREAD] = {};
#pragma unroll 2
    for (int c = 0; c < channels; c += 4) {
      float4 column;
      column.x = __ldg(map + c * channels + channel);
      column.y = __ldg(map + (c + 1) * channels + channel);
      column.z = __ldg(map + (c + 2) * channels + channel);
      column.w = __ldg(map + (c + 3) * channels + channel);
#pragma unroll
      for (int r = 0; r < ROWS_OF_A_THREAD; ++r)
        sums[r] = dot(float4_at(vectors + (first + r) * LAYOUT.row + c), column, sums[r]);
    }
#pragma unroll
    for (int r = 0; r < ROWS_OF_A_THREAD; ++r)
      results[(first + r) * LAYOUT.row + channel] = sums[r];
  }
}

/// The mean of keys at equal distances.
__device__ __forceinline__ void average(float* reference, const Keys& keys) {
  const int count = minimum(MEAN_OF, keys.count);
  for (int c = threadIdx.x; c < keys.channels; c += THREADS) {
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i)
      sum += __ldg(keys.first + static_cast<s64>(i) * keys.count / count * keys.channels + c);
    reference[c] = __fdiv_rn(sum, static_cast<float>(count));
  }
}

/// What a block takes.
struct Share {
  int rows, first, count; ///< of blocks of queries: how many have room, and which there are
  u32 head;               ///< of all sequences
  s64 first_list;

  __device__ __forceinline__ explicit Share(const Params& p) : rows(LAYOUT.rows(key_blocks(p))) {
    const int blocks = query_blocks(p), shares = ceil_div(blocks, rows);
    first = static_cast<int>(blockIdx.x % shares) * rows;
    head = blockIdx.x / shares;
    count = minimum(rows, blocks - first);
    first_list = static_cast<s64>(head) * blocks + first;
  }
};

/// Scores of ROWS blocks of queries, of which those behind the last one are copies of it.
template <int ROWS>
__device__ __forceinline__ void score(const Params& p, const Share& share, float* shared) {
  const int channels = p.channels;
  float* scores = shared;
  float* vectors = shared + LAYOUT.vectors / 4;
  float* reference = shared + LAYOUT.reference / 4;

  // Each map takes vectors to the other place; they end where no scores lie.
  float* from = (p.query_map == nullptr) == (p.key_map == nullptr) ? vectors : scores;
  float* to = from == vectors ? scores : vectors;
  for (int i = threadIdx.x; i < ROWS * channels; i += THREADS) {
    const int row = i / channels, channel = i % channels;
    from[row * LAYOUT.row + channel] =
        p.query_block_sums[(share.first_list + minimum(row, share.count - 1)) * channels + channel];
  }
  const int short_by = key_blocks(p) * SPARSE_KV - p.seq_kv;
  const u32 kv_head = share.head / (p.heads / p.heads_kv);
  const Keys keys{p.key_block_sums + static_cast<s64>(kv_head) * key_blocks(p) * channels,
                  key_blocks(p), channels, reference,
                  __fdiv_rn(SPARSE_KV, static_cast<float>(SPARSE_KV - short_by))};
  average(reference, keys);
  const int of_map = static_cast<int>(share.head % p.heads);
  if (p.query_map) {
    __syncthreads();
    const Keys map{p.query_map + of_map * p.query_map_step, channels, channels, nullptr, 1};
    multiply<ROWS, 1, false>(to, LAYOUT.row, from, map);
    float* const moved = from;
    from = to, to = moved;
  }
  if (p.key_map) {
    __syncthreads();
    multiply_transposed<ROWS>(to, from, p.key_map + of_map * p.key_map_step, channels);
  }
  __syncthreads();
  multiply<ROWS, 2, true>(scores, LAYOUT.most_scores / ROWS, vectors, keys);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  begin_in_stream_order();
  float* const shared = reinterpret_cast<float*>(shared_memory);
  const Share share(p);
  if (share.rows == 16)
    score<16>(p, share, shared);
  else
    score<8>(p, share, shared);
  __syncthreads();
  for (int row = warp_id(); row < share.count; row += WARPS)
    list_best(p, shared + row * (LAYOUT.most_scores / share.rows), share.first_list + row);
}
