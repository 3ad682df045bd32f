//===- kernels/linear_out.cuh - Linear attention's output, mixed with the exact --===//
//
// O = alpha O_s + (1 - alpha) F H / (F Z) of a block of queries, F = phi(Q), H and Z the sums over
// the blocks of keys that the block sees here. The linear output is rounded only within O. Without
// alpha it is O. O of a block whose list is invalid is NaN.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/linear.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/channel_matrix.cuh"
#include "tile/sla/mixture.cuh"

constexpr LinearLayout LAYOUT(HEAD_DIM, SPARSE_Q, 1, true);

/// Block (block of queries, head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 base = linear_base<LAYOUT.total>();
  const u32 rows = base + LAYOUT.first, matrix = base + LAYOUT.matrix;
  const u32 norms = base + LAYOUT.vectors;
  const QueryHead at = query_head(p);
  const BlockOfTokens<SPARSE_Q> block(p.seq_q);
  const s64 sums = sums_of(p.one_sum, at);
  block.load(rows, p.q + at.batch * p.q_stride_b + at.head * p.q_stride_h, p.q_stride_s);
  load_channels(norms, p.query_norms + sums * HEAD_DIM);
  load_matrix(matrix, p.query_sums + sums * MATRIX_ELEMENTS);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  const int row = warp_id() * WARP_ROWS;
  const bool mixes = p.alpha != nullptr;
  const Listed listed = listed_from(p, at, block.first);
  Rows16 features;
  load_features(features, rows, row, SPARSE_Q, false, 0);
  __syncwarp();
  if (mixes) // in the place of the queries
    load_own_rows(rows, row,
                  p.sparse_out + at.batch * p.sparse_out_stride_b +
                      at.head * p.sparse_out_stride_h + block.first * p.sparse_out_stride_s,
                  p.sparse_out_stride_s, block.count);
  cp_async_commit();
  float u[2], alpha[2];
  normalisers(u, features, norms);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u[h] = __fdiv_rn(1.0f, u[h]);
    const Shares shares = shares_of(p, at, block.first + row + lane_id() / 4 + 8 * h, listed);
    alpha[h] = listed == Listed::invalid ? __int_as_float(0x7fffffff) : shares.exact;
    u[h] *= shares.linear;
  }
  cp_async_wait<0>();
  __syncwarp();
  const WordPlaces places(rows, row);
  const ColumnsOfB by_columns(matrix);
#pragma unroll 2
  for (int c = 0; c < STEPS; ++c) {
    float linear[2][4] = {};
    product(linear, features, by_columns, c);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
      const u32 place = places.of_word(c, w);
      float x = linear[w / 2][2 * h] * u[h], y = linear[w / 2][2 * h + 1] * u[h];
      if (mixes) {
        const float2 exact = unpack<Element>(read_word(place));
        x = __fmaf_rn(exact.x, alpha[h], x);
        y = __fmaf_rn(exact.y, alpha[h], y);
      }
      write_word(place, pack<Element>(x, y));
    }
  }
  __syncwarp();
  store_own_rows(rows, row,
                 p.out + at.batch * p.out_stride_b + at.head * p.out_stride_h +
                     block.first * p.out_stride_s,
                 p.out_stride_s, block.count);
}
