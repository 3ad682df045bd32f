//===- kernels/backward_dq.cuh - dQ ---------------------------------------------===//
//
// SageBwd, Algorithm 2, the half that sums over keys. One block takes BLOCK_Q queries of one head,
// 16 a warp, and walks over the keys a quantisation group (GROUP_KV) at a time:
//   P  = exp(S - lse)      S as in the forward pass
//   dP = dO V^T - delta    16-bit; delta is where the accumulator starts
//   dS = P dP              quantised: a scale a query and group (`row`), or one a block of
//                          GROUP_Q x GROUP_KV (`block`), which backward_dkv then reads
//   dQ += dS K             INT8
//
// With STAGES = 2 shared memory holds the next group's keys and values while this one's are worked
// on. With STAGES = 1 there is one copy: its two halves (K and V for S and dP, transposed K for dQ)
// are refilled in turn.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/math.cuh"
#include "tile/products.cuh"
#include "tile/quantizer.cuh"
#include "tile/visible.cuh"

constexpr int KEY_TILES = GROUP_KV / TOKENS_PER_TILE;
constexpr int COLUMNS8 = TOKENS_PER_TILE / 8; ///< accumulators of one tile of keys

struct SharedLayout {
  static constexpr int QUERIES = 0;
  static constexpr int DOUT = QUERIES + BLOCK_Q * SCORE_ROW_BYTES;
  static constexpr int KEYS = DOUT + BLOCK_Q * VALUE_ROW_BYTES;
  static constexpr int KEYS_BYTES = GROUP_KV * SCORE_ROW_BYTES;
  static constexpr int VALUES = KEYS + STAGES * KEYS_BYTES;
  static constexpr int VALUES_BYTES = GROUP_KV * VALUE_ROW_BYTES;
  static constexpr int KEYS_T = VALUES + STAGES * VALUES_BYTES;
  static constexpr int KEYS_T_BYTES = HEAD_DIM * GROUP_KV;
  static constexpr int KEY_SCALES = KEYS_T + STAGES * KEYS_T_BYTES;
  static constexpr int KEY_SCALES_BYTES = GROUP_KV * 4;
  static constexpr int CHANNEL_SCALES = KEY_SCALES + STAGES * KEY_SCALES_BYTES;
  static constexpr int CHANNEL_SCALES_BYTES = HEAD_DIM * 4;
  static constexpr int MAXIMA = CHANNEL_SCALES + STAGES * CHANNEL_SCALES_BYTES;
  static constexpr int TOTAL = MAXIMA + (BLOCK_SCALES ? 2 * WARPS * 8 : 0);
};
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");
static_assert(!BLOCK_SCALES || BLOCK_Q == GROUP_Q, "one scale serves the whole block");

using KeyWalk = Walk<GROUP_KV>;

/// Scores become probabilities, rows g and g + 8 by their own lse.
__device__ __forceinline__ void probabilities(float (&x)[COLUMNS8][4],
                                              const float (&score_scale)[2], const float (&lse)[2],
                                              float& largest) {
#pragma unroll
  for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[j][i] = exp2_approx(__fmaf_rn(x[j][i], score_scale[i >> 1], -lse[i >> 1]));
      if constexpr (BLOCK_SCALES)
        largest = max_nan(largest, x[j][i]);
    }
  }
}

/// With a gradient through lse the rows of dS no longer sum to zero but to dlse, and the mean that
/// K-smoothing took off counts.
__device__ __forceinline__ void add_mean(const Params& p, float (&dq)[HEAD_DIM / 8][4],
                                         const QueryHead& at, int row) {
  const float* mean = p.k_mean + at.flat_kv_head * HEAD_DIM + (lane_id() & 3) * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r, row += 8) {
    if (row >= at.seq_q() || sees_nothing(at, row))
      continue;
    const float gradient = p.dlse[at.first_row() + row];
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
      dq[j][2 * r] += gradient * mean[8 * j];
      dq[j][2 * r + 1] += gradient * mean[8 * j + 1];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  const int lane = lane_id(), row_in_warp = lane >> 2, quad_lane = lane & 3;

  const int block = block_of_queries(), first_query = block * BLOCK_Q;
  const QueryHead at = query_head(p);

  const Element* values = p.v + at.first_key(p.v_stride_b) + at.kv_head * p.v_stride_h;
  const auto load_keys_and_values = [&](const KeyWalk& walk) {
    if (walk.more()) {
      const int first = walk.first(), stage = walk.stage();
      const s64 token = at.padded_key() + first;
      load_score_rows<GROUP_KV>(
          shared + SharedLayout::KEYS + stage * SharedLayout::KEYS_BYTES, p.k8 + token * HEAD_DIM,
          p.k + at.first_key(p.k_stride_b) + at.kv_head * p.k_stride_h + first * p.k_stride_s,
          p.k_stride_s, at.seq_kv() - first);
      if constexpr (!QK16)
        load_floats<GROUP_KV, THREADS>(shared + SharedLayout::KEY_SCALES +
                                           stage * SharedLayout::KEY_SCALES_BYTES,
                                       p.k8_scale + token);
      load_tile<GROUP_KV, VALUE_ROW_BYTES, THREADS>(
          shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES,
          values + first * p.v_stride_s, p.v_stride_s * 2, at.seq_kv() - first);
    }
    cp_async_commit();
  };
  const auto load_transposed_keys = [&](const KeyWalk& walk) {
    if (walk.more()) {
      const s64 token = at.padded_key() + walk.first();
      const int stage = walk.stage();
      load_dense_tile<KEY_TILES * HEAD_DIM, TOKEN_ROW_BYTES, THREADS>(
          shared + SharedLayout::KEYS_T + stage * SharedLayout::KEYS_T_BYTES,
          p.kt8 + token * HEAD_DIM);
      load_floats<HEAD_DIM, THREADS>(shared + SharedLayout::CHANNEL_SCALES +
                                         stage * SharedLayout::CHANNEL_SCALES_BYTES,
                                     p.kt8_scale + token / GROUP_KV * HEAD_DIM);
    }
    cp_async_commit();
  };

  load_score_rows<BLOCK_Q>(
      shared + SharedLayout::QUERIES, p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
      p.q + at.first_query(p.q_stride_b) + at.head * p.q_stride_h + first_query * p.q_stride_s,
      p.q_stride_s, at.seq_q() - first_query);
  load_tile<BLOCK_Q, VALUE_ROW_BYTES, THREADS>(shared + SharedLayout::DOUT,
                                               p.dout + at.first_query(p.dout_stride_b) +
                                                   at.head * p.dout_stride_h +
                                                   first_query * p.dout_stride_s,
                                               p.dout_stride_s * 2, at.seq_q() - first_query);
  KeyWalk walk(keys_of(at, tokens_from(first_query, BLOCK_Q)));
  load_keys_and_values(walk);
  if constexpr (STAGES == 2)
    load_transposed_keys(walk);

  const int warp_query = first_query + warp_id() * 16;
  const int query[2] = {warp_query + row_in_warp, warp_query + row_in_warp + 8};
  float score_scale[2], lse[2], minus_delta[2]; // scores and lse in log2 units
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const s64 first_row = at.padded_query();
    score_scale[r] =
        QK16 ? p.softmax_scale * LOG2_E : read_row(p.q_rows, first_row, query[r], ROW_SCALE);
    lse[r] = read_row(p.q_rows, first_row, query[r], ROW_SHIFT);
    minus_delta[r] = read_row(p.q_rows, first_row, query[r], ROW_MINUS_DELTA);
  }

  ScoreRows queries;
  ValueRows dout;
  float dq[HEAD_DIM / 8][4] = {};
  const auto start = [&](int) {
    return Quad{minus_delta[0], minus_delta[0], minus_delta[1], minus_delta[1]};
  };

  // Under `block` the warps put their maxima side by side; after a barrier each takes the largest.
  const auto put_maxima = [&](u32 maxima, float(&ds)[2], float& p_max) {
    ds[0] = warp_max_nan(max_nan(ds[0], ds[1]));
    p_max = warp_max_nan(p_max);
    if (lane == 0) {
      write_float(maxima + warp_id() * 8, ds[0]);
      write_float(maxima + warp_id() * 8 + 4, p_max);
    }
  };
  const auto take_maxima = [&](u32 maxima, int group, float(&ds)[2], float& p_max) {
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float2 other = read_float2(maxima + warp * 8);
      ds[0] = max_nan(ds[0], other.x);
      p_max = max_nan(p_max, other.y);
    }
    ds[1] = ds[0];
    if (threadIdx.x == 0) {
      const s64 tile = (at.first_group<GROUP_Q>() + block) * at.key_groups<GROUP_KV>();
      p.tile_ds_max[tile + group] = ds[0];
      p.tile_p_max[tile + group] = p_max;
    }
  };

  for (; walk.more(); walk = walk.next()) {
    const int stage = walk.stage(), first_key = walk.first();

    wait_for_tiles();
    if constexpr (STAGES == 2)
      load_keys_and_values(walk.next());
    load_transposed_keys(STAGES == 2 ? walk.next() : walk);
    if (walk.count == 0) {
      queries.load(shared + SharedLayout::QUERIES, warp_id() * 16);
      dout.load(shared + SharedLayout::DOUT, warp_id() * 16);
    }

    float ds[KEY_TILES][COLUMNS8][4]; // dP - delta at first
    float largest_ds[2] = {0, 0}, largest_p = 0;
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
      const int tile_key = first_key + tile * TOKENS_PER_TILE;
      Scores::Sum sums[COLUMNS8][4];
      issue_scores(sums, queries,
                   shared + SharedLayout::KEYS + stage * SharedLayout::KEYS_BYTES +
                       tile * TOKENS_PER_TILE * SCORE_ROW_BYTES);
      issue_values(ds[tile], dout,
                   shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES +
                       tile * TOKENS_PER_TILE * VALUE_ROW_BYTES,
                   start);
      finish<1>(sums);
      float x[COLUMNS8][4];
      scale_columns(x, sums,
                    shared + SharedLayout::KEY_SCALES + stage * SharedLayout::KEY_SCALES_BYTES +
                        tile * TOKENS_PER_TILE * 4);
      if (needs_mask(at, tokens_from(warp_query, 16), tokens_from(tile_key, TOKENS_PER_TILE)))
        mask(x, [&](int r, int column) { return hidden(at, query[r], tile_key + column); });
      probabilities(x, score_scale, lse, largest_p);
      finish_values<0>(ds[tile], start);
      score_gradients<true>(ds[tile], x, largest_ds);
    }

    const u32 maxima = shared + SharedLayout::MAXIMA + (walk.count & 1) * WARPS * 8;
    if constexpr (BLOCK_SCALES)
      put_maxima(maxima, largest_ds, largest_p);
    else
      quad_max_nan(largest_ds);

    if constexpr (STAGES == 1) {
      wait_for_tiles();
      load_keys_and_values(walk.next());
    } else if constexpr (BLOCK_SCALES) {
      __syncthreads();
    }
    if constexpr (BLOCK_SCALES)
      take_maxima(maxima, walk.tile, largest_ds, largest_p);
    const Scale low = fast_scale<SIGNED_LEVELS>(largest_ds[0]);
    const Scale high = fast_scale<SIGNED_LEVELS>(largest_ds[1]);
    u32 ds8[GROUP_KV / 32][4];
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile)
      quantize_fragments<true, 2>(&ds8[2 * tile], ds[tile], low.inverse, high.inverse);
    TokenProducts<true, GROUP_KV / 32> ds_k;
    ds_k.issue(ds8, shared + SharedLayout::KEYS_T + stage * SharedLayout::KEYS_T_BYTES);
    ds_k.template add_to<0>(
        dq, shared + SharedLayout::CHANNEL_SCALES + stage * SharedLayout::CHANNEL_SCALES_BYTES,
        low.value, high.value);
  }
  cp_async_wait<0>();

  if constexpr (SMOOTH_K) {
    if (p.dlse != nullptr)
      add_mean(p, dq, at, query[0]);
  }
  store_rows(p.dq + at.first_query(p.dq_stride_b) + at.head * p.dq_stride_h +
                 warp_query * p.dq_stride_s,
             p.dq_stride_s, at.seq_q() - warp_query, dq, p.softmax_scale, p.softmax_scale);
}
