//===- kernels/estimated_dq.cuh - What the estimate gives queries -----------===//
//
// dq = drest * sum_j p_j scale mean_j, where p_j, which sum to 1, are the shares of blocks in
// exp(rest). P has 16 bits; drest multiplies in FP32. 0 where no block is left. It is added to
// another gradient of the queries if there is one, which may be where dq goes.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/pooled_keys.cuh"

constexpr EstimatedLayout LAYOUT(HEAD_DIM, SPARSE_Q);

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
  tiles.keys.load(tiles.stage(0), 0);
  cp_async_commit();
  tiles.note(p, 0, tiles.look(0));

  const int row = warp_id() * WARP_ROWS;
  const u32 rests = mean + HEAD_DIM * 4 + 2 * kPooledTile * 4;
  if (threadIdx.x < SPARSE_Q) {
    const int query = block.first + threadIdx.x;
    write_float(rests + threadIdx.x * 4,
                query < p.seq_q ? __ldg(p.centred_rest + at.first_row() + query) : INFINITY_F);
  }
  float sums[STEPS][2][4] = {};
  tiles.walk(p, [&](u32 tile, u32 weights) {
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      Scores x = {};
      {
        const RowsOfA queries(rows);
        const RowsOfB keys(tile);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          u32 a[4];
          queries.load(a, row, s);
          add_scores(x, a, keys, chunk * CHUNK, s);
        }
      }
      float rest[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        rest[h] = read_float(rests + (row + lane_id() / 4 + 8 * h) * 4);
#pragma unroll
      for (int i = 0; i < CHUNK / 8; ++i) {
        const float2 weight = read_pair(weights, chunk * CHUNK + 8 * i + lane_id() % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[i][2 * h] = exp2_approx(x[i][2 * h] + weight.x - rest[h]);
          x[i][2 * h + 1] = exp2_approx(x[i][2 * h + 1] + weight.y - rest[h]);
        }
      }
      const ColumnsOfB keys(tile);
#pragma unroll
      for (int i = 0; i < CHUNK / 16; ++i) {
        u32 a[4];
        as_operand<Element>(a, x, i);
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
          u32 b[4];
          keys.load(b, chunk * CHUNK + 16 * i, c);
          multiply_as<Element>(sums[c], a, b);
        }
      }
    }
  });
  __syncwarp(); // of the queries' rows, in whose place dq goes
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int of = row + lane_id() / 4 + 8 * h;
    const float rest = read_float(rests + of * 4);
    factor[h] = rest == INFINITY_F ? 0.0f : __ldg(p.drest + at.first_row() + block.first + of);
  }
  const WordPlaces places(rows, row);
#pragma unroll
  for (int c = 0; c < STEPS; ++c) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
      const float2 m = read_pair(mean, channel_of_word(c, w));
      const float(&x)[4] = sums[c][w / 2];
      write_word(places.of_word(c, w),
                 pack<Element>(factor[h] * __fmaf_rn(x[2 * h], LN_2, m.x),
                               factor[h] * __fmaf_rn(x[2 * h + 1], LN_2, m.y)));
    }
  }
  __syncwarp();
  const Element* more =
      p.dq_more == nullptr ? nullptr : p.dq_more + (at.first_row() + block.first) * HEAD_DIM;
  store_own_rows(rows, row,
                 p.dq + at.batch * p.dq_stride_b + at.head * p.dq_stride_h +
                     block.first * p.dq_stride_s,
                 p.dq_stride_s, block.count, OwnRows(more, HEAD_DIM, row, block.count));
}
