//===- kernels/estimated_dk.cuh - What the estimate gives means of keys -----===//
//
// Sums over some blocks of queries of drest * p_j q, p_j as in kernels/estimated_dq.cuh, for each
// block of keys: the caller adds the sums up and multiplies by the softmax's factor. drest * P and
// Q are bf16, whatever the tensors are.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/pooled_keys.cuh"

constexpr EstimatedLayout LAYOUT(HEAD_DIM, kPooledTile);
constexpr int STEPS_A_LIST = SPARSE_Q / kPooledTile;
static_assert(WARPS * WARP_ROWS == kPooledTile);

/// Tiles of a part of a head's queries in two stages, beside them their centred_rest and drest.
struct QueryTiles {
  const Params& p;
  const Element* head;
  s64 first_row;
  u32 stages, vectors; ///< shared memory

  __device__ __forceinline__ QueryTiles(const Params& p, const QueryHead& at, u32 stages,
                                        u32 vectors)
      : p(p), head(p.q + at.batch * p.q_stride_b + at.head * p.q_stride_h),
        first_row(at.first_row()), stages(stages), vectors(vectors) {}
  __device__ __forceinline__ u32 stage(int tile) const {
    return stages + (tile & 1) * (kPooledTile * ROW_BYTES);
  }
  __device__ __forceinline__ u32 rests(int tile) const {
    return vectors + (tile & 1) * (2 * kPooledTile * 4);
  }
  __device__ __forceinline__ u32 factors(int tile) const { return rests(tile) + kPooledTile * 4; }
  __device__ __forceinline__ void load(int tile) const {
    const int first = tile * kPooledTile;
    load_tile<kPooledTile, ROW_BYTES, THREADS>(stage(tile), head + first * p.q_stride_s,
                                               p.q_stride_s * 2, p.seq_q - first, HEAD_DIM);
    cp_async_commit();
  }
  /// This thread's query: no share where nothing is left.
  __device__ __forceinline__ float2 look(int tile) const {
    const int query = tile * kPooledTile + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kPooledTile || query >= p.seq_q)
      return {INFINITY_F, 0.0f};
    const float rest = __ldg(p.centred_rest + first_row + query);
    return {rest, rest == INFINITY_F ? 0.0f : __ldg(p.drest + first_row + query)};
  }
  __device__ __forceinline__ void note(int tile, float2 of) const {
    if (threadIdx.x < kPooledTile) {
      write_float(rests(tile) + threadIdx.x * 4, of.x);
      write_float(factors(tile) + threadIdx.x * 4, of.y);
    }
  }
};

/// Operand B of bf16 from one of Element.
__device__ __forceinline__ void make_bf16(u32 (&b)[4]) {
  if constexpr (!IS_BF16<Element>) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = unpack<Element>(b[w]);
      b[w] = pack<bf16>(x.x, x.y);
    }
  }
}

/// Adds CHUNK queries' parts to the sums of the warp's keys.
__device__ __forceinline__ void add_queries(float (&sums)[STEPS][2][4], const Rows16& keys,
                                            const float (&weights)[2], u32 tile, u32 rests,
                                            u32 factors, int first) {
  Scores x = {};
  {
    const RowsOfB queries(tile);
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      add_scores(x, keys.x[s], queries, first, s);
  }
#pragma unroll
  for (int i = 0; i < CHUNK / 8; ++i) {
    const int query = first + 8 * i + lane_id() % 4 * 2;
    const float2 rest = read_pair(rests, query), factor = read_pair(factors, query);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[i][2 * h] = exp2_approx(x[i][2 * h] + weights[h] - rest.x) * factor.x;
      x[i][2 * h + 1] = exp2_approx(x[i][2 * h + 1] + weights[h] - rest.y) * factor.y;
    }
  }
  const ColumnsOfB queries(tile);
#pragma unroll
  for (int i = 0; i < CHUNK / 16; ++i) {
    u32 a[4];
    as_operand<bf16>(a, x, i);
#pragma unroll
    for (int c = 0; c < STEPS; ++c) {
      u32 b[4];
      queries.load(b, first + 16 * i, c);
      make_bf16(b);
      multiply(sums[c], a, b);
    }
  }
}

/// Block (tiles of means times parts of queries, head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 base = linear_base<LAYOUT.total>();
  const QueryHead at = query_head(p);
  const PooledKeys pooled(p, at);
  const int key_tiles = pooled.tiles(), key_tile = blockIdx.x % key_tiles;
  const int part = blockIdx.x / key_tiles, parts = gridDim.x / key_tiles;
  const int steps = ceil_div(p.seq_q, kPooledTile);
  const int steps_a_part = ceil_div(ceil_div(p.seq_q, SPARSE_Q), parts) * STEPS_A_LIST;
  const int begin = part * steps_a_part, end = minimum(steps, begin + steps_a_part);
  const QueryTiles tiles(p, at, base + LAYOUT.stages, base + LAYOUT.vectors);
  pooled.load(base + LAYOUT.own, key_tile);
  cp_async_commit();
  if (begin < end) {
    tiles.load(begin);
    tiles.note(begin, tiles.look(begin));
    cp_async_wait<1>();
  } else {
    cp_async_wait<0>();
  }
  __syncthreads();

  const int row = warp_id() * WARP_ROWS;
  const int key = key_tile * kPooledTile + row + lane_id() / 4; // and the 8th behind it
  Rows16 keys;
  {
    const RowsOfA of(base + LAYOUT.own);
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      of.load(keys.x[s], row, s);
  }
  float weights[2] = {};
  float sums[STEPS][2][4] = {};
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    if (tile % STEPS_A_LIST == 0) { // parts consist of whole lists
#pragma unroll
      for (int h = 0; h < 2; ++h)
        weights[h] = pooled.weight(p, key + 8 * h, pooled.is_out(tile / STEPS_A_LIST, key + 8 * h));
    }
    cp_async_wait<0>();
    __syncthreads(); // this tile is there, and nobody reads the one before it
    const bool more = tile + 1 < end;
    float2 next = {};
    if (more) {
      tiles.load(tile + 1);
      next = tiles.look(tile + 1);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
      add_queries(sums, keys, weights, tiles.stage(tile), tiles.rests(tile), tiles.factors(tile),
                  chunk * CHUNK);
    if (more)
      tiles.note(tile + 1, next);
  }
  float* to = p.pooled_dsums + ((at.flat_head * parts + part) * pooled.count + key) * HEAD_DIM +
              lane_id() % 4 * 2;
#pragma unroll
  for (int c = 0; c < STEPS; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (key + 8 * h < pooled.count)
          *reinterpret_cast<float2*>(to + h * 8 * HEAD_DIM + c * 16 +
                                     i * 8) = {sums[c][i][2 * h], sums[c][i][2 * h + 1]};
      }
    }
  }
}
