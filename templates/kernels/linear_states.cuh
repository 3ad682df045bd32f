//===- kernels/linear_states.cuh - What each block of keys adds to linear attention --===//
//
// h = phi(K - mean)^T V and z = phi(K - mean)^T 1 of a block of keys (SLA2, arXiv 2602.12675).
// Rounds phi to bf16 ahead of both sums, and h.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/linear.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/mean_of_keys.cuh"
#include "tile/sla/token_sums.cuh"

constexpr LinearLayout LAYOUT(HEAD_DIM, SPARSE_KV, 2, false);

/// Block (block of keys, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const u32 base = linear_base<LAYOUT.total>();
  const u32 keys = base + LAYOUT.first, values = base + LAYOUT.second;
  const u32 mean = base + LAYOUT.vectors;
  const KeyHead at = key_head(p);
  const BlockOfTokens<SPARSE_KV> block(p.seq_kv);
  const bool centred = load_key_mean(mean, p, at);
  block.load(keys, p.k + at.batch * p.k_stride_b + at.kv_head * p.k_stride_h, p.k_stride_s);
  cp_async_commit();
  block.load(values, p.v + at.batch * p.v_stride_b + at.kv_head * p.v_stride_h, p.v_stride_s);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();

  const int row = warp_id() * WARP_ROWS;
  Rows16 features;
  load_features(features, keys, row, block.count, centred, mean);
  __syncwarp();
  write_rows(keys, row, features);
  cp_async_wait<0>();
  __syncthreads();
  make_bf16<SPARSE_KV>(values);

  const s64 matrix = at.flat_kv_head * gridDim.x + blockIdx.x;
  sum_columns<bf16, SPARSE_KV>(p.key_norms + matrix * HEAD_DIM, keys, base + LAYOUT.vectors,
                               [](int) { return 1.0f; });
  MatrixSums h;
  h.sum<SPARSE_KV>(keys, values);
  h.store(p.key_states + matrix * MATRIX_ELEMENTS, base + LAYOUT.matrix);
}
