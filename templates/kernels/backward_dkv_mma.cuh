//===- kernels/backward_dkv_mma.cuh - dK and dV, with mma.sync --------------===//
//
// SageBwd, Algorithm 2, the half that sums over queries. One block takes BLOCK_KV keys of one
// key/value head, 16 a warp, and walks over the queries of every head of its group, 64 at a time.
// All products are transposed, so that P^T and dS^T are A operands as they leave the accumulators:
//   P^T  = exp(S^T - lse)    S^T = K Q^T
//   dV  += P^T dO            unsigned x signed INT8
//   dP^T = V dO^T - delta    16-bit
//   dK  += dS^T Q            INT8
// Scales of P and dS: exact maxima a key and query group (`row`), or those of the whole block that
// backward_dq has found (`block`). No atomics: the sum's order is fixed.
//
// Shared memory streams in two halves: Q and dO for S and dP, then their transposed copies.
//
//===----------------------------------------------------------------------===//

constexpr int TILE_Q = TOKENS_PER_TILE;
constexpr int COLUMNS8 = TILE_Q / 8;
static_assert(BLOCK_SCALES || GROUP_Q == TILE_Q, "a group's maximum is taken over one tile");

struct SharedLayout {
  static constexpr int KEYS = 0;
  static constexpr int VALUES = KEYS + BLOCK_KV * SCORE_ROW_BYTES;
  static constexpr int QUERIES = VALUES + BLOCK_KV * VALUE_ROW_BYTES;
  static constexpr int QUERIES_BYTES = TILE_Q * SCORE_ROW_BYTES;
  static constexpr int DOUT = QUERIES + STAGES * QUERIES_BYTES;
  static constexpr int DOUT_BYTES = TILE_Q * VALUE_ROW_BYTES;
  static constexpr int TRANSPOSED = DOUT + STAGES * DOUT_BYTES; ///< Q, then dO
  static constexpr int TRANSPOSED_BYTES = 2 * HEAD_DIM * TILE_Q;
  static constexpr int ROWS = TRANSPOSED + STAGES * TRANSPOSED_BYTES; ///< Q's steps, lse, delta
  static constexpr int ROWS_BYTES = 3 * TILE_Q * 4;
  static constexpr int CHANNELS = ROWS + STAGES * ROWS_BYTES; ///< steps of transposed Q, then dO
  static constexpr int CHANNELS_BYTES = 2 * HEAD_DIM * 4;
  static constexpr int TOTAL = CHANNELS + STAGES * CHANNELS_BYTES;
};
static_assert(SharedLayout::TOTAL == SHARED_BYTES, "the host launches with what is used here");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  const int lane = lane_id(), row_in_warp = lane >> 2, quad_lane = lane & 3;

  const int kv_head = blockIdx.y, batch = blockIdx.z;
  const int heads_per_kv = p.heads / p.heads_kv;
  const s64 flat_kv_head = static_cast<s64>(batch) * p.heads_kv + kv_head;
  const int first_key = blockIdx.x * BLOCK_KV;
  const int first_tile = CAUSAL ? maximum(0, first_key - p.causal_offset) / TILE_Q : 0;
  const int tiles = maximum(0, ceil_div(p.seq_q, TILE_Q) - first_tile);
  const int steps = tiles * heads_per_kv; // tile by tile, head after head

  const auto load_rows = [&](int step) {
    if (step < steps) {
      const int head = kv_head * heads_per_kv + step / tiles;
      const int first = (first_tile + step % tiles) * TILE_Q, stage = step % STAGES;
      const s64 token = (static_cast<s64>(batch) * p.heads + head) * p.padded_q + first;
      const u32 tile = shared + SharedLayout::QUERIES + stage * SharedLayout::QUERIES_BYTES;
      const u32 rows = shared + SharedLayout::ROWS + stage * SharedLayout::ROWS_BYTES;
      if constexpr (QK16) {
        load_tile<TILE_Q, SCORE_ROW_BYTES, THREADS>(
            tile, p.q + batch * p.q_stride_b + head * p.q_stride_h + first * p.q_stride_s,
            p.q_stride_s * 2, p.seq_q - first);
      } else {
        load_dense_tile<TILE_Q, SCORE_ROW_BYTES, THREADS>(tile, p.q8 + token * HEAD_DIM);
        load_floats<TILE_Q, THREADS>(rows, p.q8_scale + token);
      }
      load_floats<TILE_Q, THREADS>(rows + TILE_Q * 4, p.lse_log2 + token);
      load_floats<TILE_Q, THREADS>(rows + TILE_Q * 8, p.delta + token);
      load_tile<TILE_Q, VALUE_ROW_BYTES, THREADS>(
          shared + SharedLayout::DOUT + stage * SharedLayout::DOUT_BYTES,
          p.dout + batch * p.dout_stride_b + head * p.dout_stride_h + first * p.dout_stride_s,
          p.dout_stride_s * 2, p.seq_q - first);
    }
    cp_async_commit();
  };
  const auto load_transposed = [&](int step) {
    if (step < steps) {
      const int head = kv_head * heads_per_kv + step / tiles;
      const int first = (first_tile + step % tiles) * TILE_Q, stage = step % STAGES;
      const s64 token = (static_cast<s64>(batch) * p.heads + head) * p.padded_q + first;
      const u32 tile = shared + SharedLayout::TRANSPOSED + stage * SharedLayout::TRANSPOSED_BYTES;
      const u32 scales = shared + SharedLayout::CHANNELS + stage * SharedLayout::CHANNELS_BYTES;
      load_dense_tile<HEAD_DIM, TOKEN_ROW_BYTES, THREADS>(tile, p.qt8 + token * HEAD_DIM);
      load_dense_tile<HEAD_DIM, TOKEN_ROW_BYTES, THREADS>(tile + HEAD_DIM * TILE_Q,
                                                          p.dot8 + token * HEAD_DIM);
      load_floats<HEAD_DIM, THREADS>(scales, p.qt8_scale + token / GROUP_Q * HEAD_DIM);
      load_floats<HEAD_DIM, THREADS>(scales + HEAD_DIM * 4,
                                     p.dot8_scale + token / GROUP_Q * HEAD_DIM);
    }
    cp_async_commit();
  };

  // K and V stay for the whole walk.
  if constexpr (QK16)
    load_tile<BLOCK_KV, SCORE_ROW_BYTES, THREADS>(
        shared + SharedLayout::KEYS,
        p.k + batch * p.k_stride_b + kv_head * p.k_stride_h + first_key * p.k_stride_s,
        p.k_stride_s * 2, p.seq_kv - first_key);
  else
    load_dense_tile<BLOCK_KV, SCORE_ROW_BYTES, THREADS>(
        shared + SharedLayout::KEYS, p.k8 + (flat_kv_head * p.padded_kv + first_key) * HEAD_DIM);
  load_tile<BLOCK_KV, VALUE_ROW_BYTES, THREADS>(
      shared + SharedLayout::VALUES,
      p.v + batch * p.v_stride_b + kv_head * p.v_stride_h + first_key * p.v_stride_s,
      p.v_stride_s * 2, p.seq_kv - first_key);
  load_rows(0);
  if constexpr (STAGES == 2)
    load_transposed(0);

  const int warp_key = first_key + warp_id() * 16;
  const int key[2] = {warp_key + row_in_warp, warp_key + row_in_warp + 8};
  float key_step[2] = {1.0f, 1.0f};
  if constexpr (!QK16) {
    key_step[0] = p.k8_scale[flat_kv_head * p.padded_kv + key[0]];
    key_step[1] = p.k8_scale[flat_kv_head * p.padded_kv + key[1]];
  }
  const float log2_scale = p.softmax_scale * LOG2_E;

  RowFragments<SCORE_ROW_BYTES, SCORE_ROWS_IN_REGISTERS> keys;
  RowFragments<VALUE_ROW_BYTES, VALUE_ROWS_IN_REGISTERS> values;
  float dk[HEAD_DIM / 8][4] = {}, dv[HEAD_DIM / 8][4] = {};

  for (int step = 0; step < steps; ++step) {
    const int stage = step % STAGES, first_query = (first_tile + step % tiles) * TILE_Q;

    cp_async_wait<STAGES - 1>();
    __syncthreads();
    if constexpr (STAGES == 1)
      load_transposed(step);
    else
      load_rows(step + 1);
    if (step == 0) {
      keys.load(shared + SharedLayout::KEYS, warp_id() * 16);
      values.load(shared + SharedLayout::VALUES, warp_id() * 16);
    }
    float largest_p[2] = {0, 0}, largest_ds[2] = {0, 0};
    if constexpr (BLOCK_SCALES) {
      const int head = kv_head * heads_per_kv + step / tiles;
      const s64 row = (static_cast<s64>(batch) * p.heads + head) * (p.padded_q / GROUP_Q) +
                      first_query / GROUP_Q;
      const s64 tile = row * (p.padded_kv / GROUP_KV) + warp_key / GROUP_KV;
      // A block in which no query sees a key was not visited.
      const int last_query = (first_query / GROUP_Q + 1) * GROUP_Q - 1;
      if (!CAUSAL || warp_key / GROUP_KV * GROUP_KV <= last_query + p.causal_offset) {
        largest_p[0] = largest_p[1] = p.tile_p_max[tile];
        largest_ds[0] = largest_ds[1] = p.tile_ds_max[tile];
      }
    }

    const u32 rows = shared + SharedLayout::ROWS + stage * SharedLayout::ROWS_BYTES + quad_lane * 8;
    float x[COLUMNS8][4], ds[COLUMNS8][4];
    {
      ScoreSum products[COLUMNS8][4] = {};
      multiply_scores<COLUMNS8>(products, keys,
                                shared + SharedLayout::QUERIES +
                                    stage * SharedLayout::QUERIES_BYTES);
#pragma unroll
      for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[j][i] = static_cast<float>(products[j][i]) * key_step[i >> 1];
      }
    }
    if ((CAUSAL && warp_key + 15 > first_query + p.causal_offset) || warp_key + 16 > p.seq_kv) {
#pragma unroll
      for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = first_query + 8 * j + 2 * quad_lane + (i & 1);
          if (key[i >> 1] >= p.seq_kv || (CAUSAL && key[i >> 1] > query + p.causal_offset))
            x[j][i] = -INFINITY_F;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
      float2 score_step = {log2_scale, log2_scale};
      if constexpr (!QK16) {
        const float2 query_step = read_float2(rows + j * 32);
        score_step = {log2_scale * query_step.x, log2_scale * query_step.y};
      }
      const float2 lse = read_float2(rows + TILE_Q * 4 + j * 32);
      const float2 delta = read_float2(rows + TILE_Q * 8 + j * 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        x[j][2 * r] = exp2_approx(__fmaf_rn(x[j][2 * r], score_step.x, -lse.x));
        x[j][2 * r + 1] = exp2_approx(__fmaf_rn(x[j][2 * r + 1], score_step.y, -lse.y));
        if constexpr (!BLOCK_SCALES)
          largest_p[r] = max_nan(largest_p[r], max_nan(x[j][2 * r], x[j][2 * r + 1]));
        ds[j][2 * r] = -delta.x;
        ds[j][2 * r + 1] = -delta.y;
      }
    }
    multiply_values<COLUMNS8>(ds, values,
                              shared + SharedLayout::DOUT + stage * SharedLayout::DOUT_BYTES);
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ds[j][i] *= x[j][i];
        if constexpr (!BLOCK_SCALES)
          largest_ds[i >> 1] = max_nan(largest_ds[i >> 1], magnitude(ds[j][i]));
      }
    }
    if constexpr (!BLOCK_SCALES) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest_p[r] = quad_max_nan(largest_p[r]);
        largest_ds[r] = quad_max_nan(largest_ds[r]);
      }
    }
    const Scale p_low = fast_scale<UNSIGNED_LEVELS>(largest_p[0]);
    const Scale p_high = fast_scale<UNSIGNED_LEVELS>(largest_p[1]);
    const Scale ds_low = fast_scale<SIGNED_LEVELS>(largest_ds[0]);
    const Scale ds_high = fast_scale<SIGNED_LEVELS>(largest_ds[1]);
    u32 p8[TILE_Q / 32][4], ds8[TILE_Q / 32][4];
#pragma unroll
    for (int k = 0; k < TILE_Q / 32; ++k) {
      quantize_fragment<false>(p8[k], &x[4 * k], p_low.inverse, p_high.inverse);
      quantize_fragment<true>(ds8[k], &ds[4 * k], ds_low.inverse, ds_high.inverse);
    }

    cp_async_wait<STAGES - 1>();
    __syncthreads();
    if constexpr (STAGES == 1)
      load_rows(step + 1);
    else
      load_transposed(step + 1);
    const u32 transposed =
        shared + SharedLayout::TRANSPOSED + stage * SharedLayout::TRANSPOSED_BYTES;
    const u32 channels = shared + SharedLayout::CHANNELS + stage * SharedLayout::CHANNELS_BYTES;
    multiply_tokens<false, TILE_Q / 32>(dv, p8, transposed + HEAD_DIM * TILE_Q,
                                        channels + HEAD_DIM * 4, p_low.step, p_high.step);
    multiply_tokens<true, TILE_Q / 32>(dk, ds8, transposed, channels, ds_low.step, ds_high.step);
  }
  cp_async_wait<0>();

  store_rows(p.dk + batch * p.dk_stride_b + kv_head * p.dk_stride_h + warp_key * p.dk_stride_s,
             p.dk_stride_s, p.seq_kv - warp_key, dk, p.softmax_scale, p.softmax_scale);
  store_rows(p.dv + batch * p.dv_stride_b + kv_head * p.dv_stride_h + warp_key * p.dv_stride_s,
             p.dv_stride_s, p.seq_kv - warp_key, dv, 1.0f, 1.0f);
}
