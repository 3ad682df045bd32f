//===- kernels/estimated_rest.cuh - What unlisted keys would weigh ----------===//
//
// rest = log sum over the blocks of keys that a query's list leaves out of tokens * exp(scale q .
// mean of the block's keys). -inf where the list has all blocks. centred_rest is the same to base 2
// without what the mean of means adds, and +inf there: the backward subtracts it from scores.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/pooled_keys.cuh"

constexpr EstimatedLayout LAYOUT(HEAD_DIM, SPARSE_Q);

/// A sum of powers of two, divided by 2 ** `most`.
struct PowerSum {
  float most = -3e38f; // finite: -inf - -inf would be NaN
  float sum = 0;
  __device__ __forceinline__ void raise(float to) {
    sum *= exp2_approx(most - to);
    most = to;
  }
};

/// Block (block of queries, head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 base = linear_base<LAYOUT.total>();
  const u32 rows = base + LAYOUT.own, mean = base + LAYOUT.vectors;
  const QueryHead at = query_head(p);
  const BlockOfTokens<SPARSE_Q> block(p.seq_q);
  const PooledTiles tiles{PooledKeys(p, at), base + LAYOUT.stages, mean + HEAD_DIM * 4,
                          static_cast<int>(blockIdx.x)};
  block.load(rows, p.q + at.batch * p.q_stride_b + at.head * p.q_stride_h, p.q_stride_s);
  load_channels(mean, p.pooled_mean + at.flat_kv_head * HEAD_DIM);
  cp_async_commit();
  tiles.keys.load(tiles.stage(0), 0);
  cp_async_commit();
  tiles.note(p, 0, tiles.look(0));
  cp_async_wait<1>();
  __syncthreads();

  const int row = warp_id() * WARP_ROWS;
  Rows16 queries;
  float of_mean[2] = {};
  {
    const RowsOfA of(rows);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      of.load(queries.x[s], row, s);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 q = unpack<Element>(queries.x[s][w]);
        const float2 m = read_pair(mean, channel_of_word(s, w));
        float& dot = of_mean[half_of_word(w)];
        dot = __fmaf_rn(q.x, m.x, __fmaf_rn(q.y, m.y, dot));
      }
    }
  }
  PowerSum sums[2]; // of this lane's columns
  tiles.walk(p, [&](u32 tile, u32 weights) {
    const RowsOfB keys(tile);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      Scores x = {};
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
        add_scores(x, queries.x[s], keys, chunk * CHUNK, s);
      float most[2] = {sums[0].most, sums[1].most};
#pragma unroll
      for (int i = 0; i < CHUNK / 8; ++i) {
        const float2 weight = read_pair(weights, chunk * CHUNK + 8 * i + lane_id() % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[i][2 * h] += weight.x, x[i][2 * h + 1] += weight.y;
          most[h] = max_number(most[h], max_number(x[i][2 * h], x[i][2 * h + 1]));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[h].raise(most[h]);
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i)
          sums[h].sum += exp2_approx(x[i / 2][2 * h + i % 2] - most[h]);
      }
    }
  });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sums[h].raise(quad_max_number(sums[h].most));
    const float sum = quad_sum(sums[h].sum);
    const float dot = quad_sum(of_mean[h]);
    const bool none = sum == 0;
    const float rest = sums[h].most + log2_approx(sum);
    const int query = block.first + row + lane_id() / 4 + 8 * h;
    if (lane_id() % 4 == 0 && query < p.seq_q) {
      p.rest[at.first_row() + query] = none ? -INFINITY_F : __fmaf_rn(rest, LN_2, dot);
      p.centred_rest[at.first_row() + query] = none ? INFINITY_F : rest;
    }
  }
}
