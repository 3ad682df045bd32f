//===- kernels/linear_dkv.cuh - Gradients of linear attention's keys and values --===//
//
// This kernel computes dV and dK' of a block of keys from A and y, the gradients of its h and z.
// With G = phi(K - mean) they are
//   dV = G A,  dG = V A^T + 1 y^T,  dK' = G * (dG - rows' sums of G * dG).
// G is bf16, and its rows' sums are divided out. dK' is of keys less their mean: its sums over the
// block go to dk_sums, for kernels/linear_mean.cuh, whose result kernels/linear_dk.cuh takes off.
// Other gradients that are added, dk_more and dv_more, have the strides of dk and dv.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/linear.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/mean_of_keys.cuh"

constexpr LinearLayout LAYOUT(HEAD_DIM, SPARSE_KV, 2, true);

/// Computes dG of the warp's rows.
__device__ __forceinline__ void feature_gradients(float (&dg)[STEPS][2][4], u32 values, u32 matrix,
                                                  int row) {
  const RowsOfA left(values);
  const RowsOfB right(matrix);
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    u32 a[4];
    left.load(a, row, s);
    if constexpr (!IS_BF16<Element>) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = unpack<Element>(a[w]);
        a[w] = pack<bf16>(x.x, x.y);
      }
    }
#pragma unroll
    for (int c = 0; c < STEPS; ++c) {
      u32 b[4];
      right.load(b, c * 16, s);
      multiply(dg[c], a, b);
    }
  }
}

/// dK' of the warp's rows, whose features lie in `keys`, into their places in `to`.
__device__ __forceinline__ void key_gradients(u32 to, u32 keys, u32 values, u32 matrix, int row,
                                              u32 dnorms) {
  float dg[STEPS][2][4] = {};
  feature_gradients(dg, values, matrix, row);
  const RowsOfA features(keys);
  float sum[2] = {}, all[2] = {};
#pragma unroll
  for (int c = 0; c < STEPS; ++c) {
    u32 words[4];
    features.load(words, row, c);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
      const float2 f = unpack<bf16>(words[w]);
      const float2 y = read_pair(dnorms, channel_of_word(c, w));
      float(&x)[4] = dg[c][w / 2];
      x[2 * h] += y.x, x[2 * h + 1] += y.y;
      sum[h] = __fmaf_rn(f.x, x[2 * h], __fmaf_rn(f.y, x[2 * h + 1], sum[h]));
      all[h] += f.x + f.y;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float of_row = quad_sum(all[h]); // 0 in rows that are no keys
    sum[h] = quad_sum(sum[h]);
    sum[h] = of_row == 0 ? 0.0f : __fdiv_rn(sum[h], of_row);
  }
  __syncwarp(); // `to` may be `values`, which other lanes have read
  const WordPlaces places(to, row);
#pragma unroll
  for (int c = 0; c < STEPS; ++c) {
    u32 words[4];
    features.load(words, row, c);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
      const float2 f = unpack<bf16>(words[w]);
      const float(&x)[4] = dg[c][w / 2];
      write_word(places.of_word(c, w),
                 pack<Element>(f.x * (x[2 * h] - sum[h]), f.y * (x[2 * h + 1] - sum[h])));
    }
  }
}

/// Block (block of keys, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 base = linear_base<LAYOUT.total>();
  const u32 keys = base + LAYOUT.first, values = base + LAYOUT.second;
  const u32 matrix = base + LAYOUT.matrix;
  const u32 mean = base + LAYOUT.vectors, dnorms = mean + HEAD_DIM * 4;
  const KeyHead at = key_head(p);
  const BlockOfTokens<SPARSE_KV> block(p.seq_kv);
  const s64 sums = p.one_sum ? at.flat_kv_head : at.flat_kv_head * gridDim.x + blockIdx.x;
  const bool centred = load_key_mean(mean, p, at);
  block.load(keys, p.k + at.batch * p.k_stride_b + at.kv_head * p.k_stride_h, p.k_stride_s);
  block.load(values, p.v + at.batch * p.v_stride_b + at.kv_head * p.v_stride_h, p.v_stride_s);
  load_channels(dnorms, p.key_dnorms + sums * HEAD_DIM);
  load_matrix(matrix, p.key_dsums + sums * MATRIX_ELEMENTS);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  const int row = warp_id() * WARP_ROWS;
  Rows16 features;
  load_features(features, keys, row, block.count, centred, mean);
  __syncwarp();
  const WordPlaces places(keys, row);
  const ColumnsOfB of_values(matrix);
#pragma unroll 2
  for (int c = 0; c < STEPS; ++c) { // dV, in the keys' place
    float x[2][4] = {};
    product(x, features, of_values, c);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int h = half_of_word(w);
      write_word(places.of_word(c, w), pack<Element>(x[w / 2][2 * h], x[w / 2][2 * h + 1]));
    }
  }
  __syncwarp();
  const s64 of_dv =
      at.batch * p.dv_stride_b + at.kv_head * p.dv_stride_h + block.first * p.dv_stride_s;
  store_own_rows(
      keys, row, p.dv + of_dv, p.dv_stride_s, block.count,
      OwnRows(p.dv_more == nullptr ? nullptr : p.dv_more + of_dv, p.dv_stride_s, row, block.count));
  __syncwarp();
  write_rows(keys, row, features);
  __syncwarp();
  key_gradients(values, keys, values, matrix, row, dnorms);
  __syncwarp();
  const s64 of_dk =
      at.batch * p.dk_stride_b + at.kv_head * p.dk_stride_h + block.first * p.dk_stride_s;
  store_own_rows(
      values, row, p.dk + of_dk, p.dk_stride_s, block.count,
      OwnRows(p.dk_more == nullptr ? nullptr : p.dk_more + of_dk, p.dk_stride_s, row, block.count));
  if (p.dk_sums == nullptr)
    return;
  __syncthreads();
  sum_columns<Element, SPARSE_KV>(p.dk_sums + (at.flat_kv_head * gridDim.x + blockIdx.x) * HEAD_DIM,
                                  values, matrix, [](int) { return 1.0f; });
}
