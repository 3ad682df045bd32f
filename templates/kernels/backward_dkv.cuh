//===- kernels/backward_dkv.cuh - dK and dV -------------------------------------===//
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
// With STAGES = 2 shared memory holds the next tile's Q, dO and transposed copies while this one's
// are worked on, and everything between two barriers can overlap. With STAGES = 1 there is one
// copy: its two halves (rows for S and dP, transposed for dV and dK) are refilled in turn.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/math.cuh"
#include "tile/products.cuh"
#include "tile/quantizer.cuh"
#include "tile/visible.cuh"

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
  static constexpr int ROWS = TRANSPOSED + STAGES * TRANSPOSED_BYTES; ///< vectors per query
  static constexpr int ROWS_BYTES = ROW_VECTORS * TILE_Q * 4;
  static constexpr int CHANNELS = ROWS + STAGES * ROWS_BYTES; ///< scales of transposed Q, then dO
  static constexpr int CHANNELS_BYTES = CHANNEL_VECTORS * HEAD_DIM * 4;
  static constexpr int TOTAL = CHANNELS + STAGES * CHANNELS_BYTES;
};
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");

/// Scores become probabilities: columns by their queries' scales and lse, among the vectors `rows`.
__device__ __forceinline__ void probabilities(float (&x)[COLUMNS8][4], u32 rows,
                                              float (&largest)[2]) {
#pragma unroll
  for (int pair = 0; pair < COLUMNS8 / 2; ++pair) {
    const float4 scales = read_columns(rows + ROW_SCALE * TILE_Q * 4, pair);
    const float4 lses = read_columns(rows + ROW_SHIFT * TILE_Q * 4, pair);
    const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
    const float lse[4] = {lses.x, lses.y, lses.z, lses.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 2 * half + (i & 1);
        float& score = x[2 * pair + half][i];
        score = exp2_approx(__fmaf_rn(score, scale[column], -lse[column]));
        if constexpr (!BLOCK_SCALES)
          largest[i >> 1] = max_nan(largest[i >> 1], score);
      }
    }
  }
}

/// Where the walk over the queries of a group's heads stands.
struct QueryWalk {
  int head;  ///< query head; heads_end past the last
  int tile;  ///< of TILE_Q queries
  s64 token; ///< the tile's first query in the padded copies
  s64 dout;  ///< and its place in dO, in elements
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  const int lane = lane_id(), row_in_warp = lane >> 2;

  const KeyHead at = key_head(p);
  const int first_key = blockIdx.x * BLOCK_KV;
  const Range queries = queries_of(at, tokens_from(first_key, BLOCK_KV));
  const int first_tile = queries.begin / TILE_Q, last_tile = ceil_div(queries.end, TILE_Q) - 1;
  const int heads_end = (at.kv_head + 1) * at.heads;
  // From the last tile of a head to the first of the next.
  const s64 token_turn = p.padded_q - static_cast<s64>(last_tile - first_tile) * TILE_Q;
  const s64 dout_turn =
      p.dout_stride_h - static_cast<s64>(last_tile - first_tile) * TILE_Q * p.dout_stride_s;
  const auto advance = [&](QueryWalk walk) {
    const bool same_head = walk.tile < last_tile;
    return QueryWalk{same_head ? walk.head : walk.head + 1, same_head ? walk.tile + 1 : first_tile,
                     walk.token + (same_head ? TILE_Q : token_turn),
                     walk.dout + (same_head ? TILE_Q * p.dout_stride_s : dout_turn)};
  };

  const auto load_rows = [&](const QueryWalk& walk, int stage) {
    if (walk.head < heads_end) {
      const int first = walk.tile * TILE_Q;
      const u32 tile = shared + SharedLayout::QUERIES + stage * SharedLayout::QUERIES_BYTES;
      load_score_rows<TILE_Q>(tile, p.q8 + walk.token * HEAD_DIM,
                              p.q + at.first_query(p.q_stride_b) + walk.head * p.q_stride_h +
                                  first * p.q_stride_s,
                              p.q_stride_s, at.seq_q() - first);
      load_floats<ROW_VECTORS * TILE_Q, THREADS>(shared + SharedLayout::ROWS +
                                                     stage * SharedLayout::ROWS_BYTES,
                                                 p.q_rows + walk.token * ROW_VECTORS);
      load_tile<TILE_Q, VALUE_ROW_BYTES, THREADS>(
          shared + SharedLayout::DOUT + stage * SharedLayout::DOUT_BYTES, p.dout + walk.dout,
          p.dout_stride_s * 2, at.seq_q() - first);
    }
    cp_async_commit();
  };
  const auto load_transposed = [&](const QueryWalk& walk, int stage) {
    if (walk.head < heads_end) {
      const u32 tile = shared + SharedLayout::TRANSPOSED + stage * SharedLayout::TRANSPOSED_BYTES;
      load_dense_tile<HEAD_DIM, TOKEN_ROW_BYTES, THREADS>(tile, p.qt8 + walk.token * HEAD_DIM);
      load_dense_tile<HEAD_DIM, TOKEN_ROW_BYTES, THREADS>(tile + HEAD_DIM * TILE_Q,
                                                          p.dot8 + walk.token * HEAD_DIM);
      load_floats<CHANNEL_VECTORS * HEAD_DIM, THREADS>(
          shared + SharedLayout::CHANNELS + stage * SharedLayout::CHANNELS_BYTES,
          p.q_channels + walk.token / GROUP_Q * (CHANNEL_VECTORS * HEAD_DIM));
    }
    cp_async_commit();
  };

  // K and V stay for the whole walk.
  load_score_rows<BLOCK_KV>(
      shared + SharedLayout::KEYS, p.k8 + (at.padded_key() + first_key) * HEAD_DIM,
      p.k + at.first_key(p.k_stride_b) + at.kv_head * p.k_stride_h + first_key * p.k_stride_s,
      p.k_stride_s, at.seq_kv() - first_key);
  load_tile<BLOCK_KV, VALUE_ROW_BYTES, THREADS>(
      shared + SharedLayout::VALUES,
      p.v + at.first_key(p.v_stride_b) + at.kv_head * p.v_stride_h + first_key * p.v_stride_s,
      p.v_stride_s * 2, at.seq_kv() - first_key);
  const int first_head = at.kv_head * at.heads, first_token = first_tile * TILE_Q;
  QueryWalk walk = {first_tile <= last_tile ? first_head : heads_end, first_tile,
                    at.padded_query(first_head) + first_token,
                    at.first_query(p.dout_stride_b) + first_head * p.dout_stride_h +
                        first_token * p.dout_stride_s};
  load_rows(walk, 0);
  if constexpr (STAGES == 2)
    load_transposed(walk, 0);

  const int warp_key = first_key + warp_id() * 16;
  const int key[2] = {warp_key + row_in_warp, warp_key + row_in_warp + 8};
  float key_scale[2] = {1.0f, 1.0f};
  if constexpr (!QK16) {
    key_scale[0] = p.k8_scale[at.padded_key() + sigma_slot(key[0])];
    key_scale[1] = p.k8_scale[at.padded_key() + sigma_slot(key[1])];
  }

  ScoreRows keys;
  ValueRows values;
  float dk[HEAD_DIM / 8][4] = {}, dv[HEAD_DIM / 8][4] = {};

  const auto read_block_maxima = [&](const QueryWalk& walk, float(&of_p)[2], float(&of_ds)[2]) {
    const int first_query = walk.tile * TILE_Q;
    // The same number twice; which costs ptxas fewer registers depends on the head dimension.
    const int row = HEAD_DIM <= 64 ? static_cast<int>(walk.token / GROUP_Q)
                                   : at.first_group<GROUP_Q>(walk.head) + first_query / GROUP_Q;
    const int tile = row * at.key_groups<GROUP_KV>() + warp_key / GROUP_KV;
    // A block in which no query sees a key was not visited.
    if (meet(at, tokens_from(first_query / GROUP_Q * GROUP_Q, GROUP_Q),
             tokens_from(warp_key / GROUP_KV * GROUP_KV, GROUP_KV))) {
      of_p[0] = of_p[1] = p.tile_p_max[tile];
      of_ds[0] = of_ds[1] = p.tile_ds_max[tile];
    }
  };

  for (int step = 0; walk.head < heads_end; ++step) {
    const int stage = step % STAGES, next_stage = (step + 1) % STAGES;
    const int first_query = walk.tile * TILE_Q;
    const QueryWalk next = advance(walk);

    wait_for_tiles();
    if constexpr (STAGES == 2)
      load_rows(next, next_stage);
    load_transposed(STAGES == 2 ? next : walk, next_stage);
    if (step == 0) {
      keys.load(shared + SharedLayout::KEYS, warp_id() * 16);
      values.load(shared + SharedLayout::VALUES, warp_id() * 16);
    }
    const u32 rows = shared + SharedLayout::ROWS + stage * SharedLayout::ROWS_BYTES;
    Scores::Sum sums[COLUMNS8][4];
    issue_scores(sums, keys, shared + SharedLayout::QUERIES + stage * SharedLayout::QUERIES_BYTES);
    float ds[COLUMNS8][4]; // dP - delta at first
    const auto minus_delta = [&](int j) {
      const float4 of_pair = read_columns(rows + ROW_MINUS_DELTA * TILE_Q * 4, j / 2);
      return j % 2 == 0 ? Quad{of_pair.x, of_pair.y, of_pair.x, of_pair.y}
                        : Quad{of_pair.z, of_pair.w, of_pair.z, of_pair.w};
    };
    issue_values(ds, values, shared + SharedLayout::DOUT + stage * SharedLayout::DOUT_BYTES,
                 minus_delta);
    finish<1>(sums);
    float largest_p[2] = {0, 0}, largest_ds[2] = {0, 0};
    float x[COLUMNS8][4];
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] = Scores::scaled(sums[j][i], key_scale[i >> 1]);
    }
    if (needs_mask(at, tokens_from(first_query, TILE_Q), tokens_from(warp_key, 16)))
      mask(x, [&](int r, int column) { return hidden(at, first_query + column, key[r]); });
    probabilities(x, rows, largest_p);
    if constexpr (BLOCK_SCALES)
      read_block_maxima(walk, largest_p, largest_ds);
    else
      quad_max_nan(largest_p);
    const Scale p_low = fast_scale<UNSIGNED_LEVELS>(largest_p[0]);
    const Scale p_high = fast_scale<UNSIGNED_LEVELS>(largest_p[1]);
    u32 p8[TILE_Q / 32][4], ds8[TILE_Q / 32][4];
    quantize_fragments<false, TILE_Q / 32>(p8, x, p_low.inverse, p_high.inverse);

    finish_values<0>(ds, minus_delta);
    score_gradients<!BLOCK_SCALES>(ds, x, largest_ds);
    if constexpr (!BLOCK_SCALES)
      quad_max_nan(largest_ds);
    const Scale ds_low = fast_scale<SIGNED_LEVELS>(largest_ds[0]);
    const Scale ds_high = fast_scale<SIGNED_LEVELS>(largest_ds[1]);
    quantize_fragments<true, TILE_Q / 32>(ds8, ds, ds_low.inverse, ds_high.inverse);

    if constexpr (STAGES == 1) {
      wait_for_tiles();
      load_rows(next, 0);
    }
    const u32 transposed =
        shared + SharedLayout::TRANSPOSED + stage * SharedLayout::TRANSPOSED_BYTES;
    const u32 channels = shared + SharedLayout::CHANNELS + stage * SharedLayout::CHANNELS_BYTES;
    const u32 dout_scales = channels + CHANNEL_DOUT * HEAD_DIM * 4;
    const u32 q_scales = channels + CHANNEL_Q * HEAD_DIM * 4;
    // Both products are under way at once where there are registers for both.
    TokenProducts<false, TILE_Q / 32> p_dout;
    TokenProducts<true, TILE_Q / 32> ds_q;
    p_dout.issue(p8, transposed + HEAD_DIM * TILE_Q);
    if constexpr (HEAD_DIM <= 64)
      ds_q.issue(ds8, transposed);
    p_dout.template add_to<HEAD_DIM <= 64 ? 1 : 0>(dv, dout_scales, p_low.value, p_high.value);
    if constexpr (HEAD_DIM > 64)
      ds_q.issue(ds8, transposed);
    ds_q.template add_to<0>(dk, q_scales, ds_low.value, ds_high.value);
    walk = next;
  }
  cp_async_wait<0>();

  store_rows(p.dk + at.first_key(p.dk_stride_b) + at.kv_head * p.dk_stride_h +
                 warp_key * p.dk_stride_s,
             p.dk_stride_s, at.seq_kv() - warp_key, dk, p.softmax_scale, p.softmax_scale);
  store_rows(p.dv + at.first_key(p.dv_stride_b) + at.kv_head * p.dv_stride_h +
                 warp_key * p.dv_stride_s,
             p.dv_stride_s, at.seq_kv() - warp_key, dv, 1.0f, 1.0f);
}
