//===- kernels/forward.cuh - O and lse ------------------------------------------===//
//
// SageBwd, Algorithm 1. One block takes BLOCK_Q queries of one head, 16 a warp, and walks over the
// keys a quantisation group (GROUP_KV) at a time:
//   S = Q K^T            INT8 (16-bit under qk16); dequantised by token scales
//   P = exp(S - rowmax)  quantised with the constant scale 1/255: the row's maximum is 1
//   O = O alpha + P V    unsigned x signed INT8, one scale a channel and group
// alpha and beta carry the running maximum: each group's P is taken against its own maximum.
//
// With STAGES = 2 shared memory holds the next group's keys and values while this one's are worked
// on. With STAGES = 1 there is one copy: K and V are refilled in turn.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/math.cuh"
#include "tile/products.cuh"
#include "tile/softmax.cuh"
#include "tile/visible.cuh"

constexpr int KEY_TILES = GROUP_KV / TOKENS_PER_TILE;

struct SharedLayout {
  static constexpr int QUERIES = 0;
  static constexpr int KEYS = QUERIES + BLOCK_Q * SCORE_ROW_BYTES;
  static constexpr int KEYS_BYTES = GROUP_KV * SCORE_ROW_BYTES;
  static constexpr int VALUES = KEYS + STAGES * KEYS_BYTES;
  static constexpr int VALUES_BYTES = HEAD_DIM * GROUP_KV;
  static constexpr int KEY_SCALES = VALUES + STAGES * VALUES_BYTES;
  static constexpr int KEY_SCALES_BYTES = GROUP_KV * 4;
  static constexpr int CHANNEL_SCALES = KEY_SCALES + STAGES * KEY_SCALES_BYTES;
  static constexpr int CHANNEL_SCALES_BYTES = HEAD_DIM * 4;
  static constexpr int TOTAL = CHANNEL_SCALES + STAGES * CHANNEL_SCALES_BYTES;
};
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");

using KeyWalk = Walk<GROUP_KV>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  const int lane = lane_id(), row_in_warp = lane >> 2, quad_lane = lane & 3;

  const int block = block_of_queries(), first_query = block * BLOCK_Q;
  const QueryHead at = query_head(p);

  const auto load_keys = [&](const KeyWalk& walk) {
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
    }
    cp_async_commit();
  };
  const auto load_values = [&](const KeyWalk& walk) {
    if (walk.more()) {
      const s64 token = at.padded_key() + walk.first();
      const int stage = walk.stage();
      load_dense_tile<KEY_TILES * HEAD_DIM, TOKEN_ROW_BYTES, THREADS>(
          shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES,
          p.vt8 + token * HEAD_DIM);
      load_floats<HEAD_DIM, THREADS>(shared + SharedLayout::CHANNEL_SCALES +
                                         stage * SharedLayout::CHANNEL_SCALES_BYTES,
                                     p.vt8_scale + token / GROUP_KV * HEAD_DIM);
    }
    cp_async_commit();
  };

  load_score_rows<BLOCK_Q>(
      shared + SharedLayout::QUERIES, p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
      p.q + at.first_query(p.q_stride_b) + at.head * p.q_stride_h + first_query * p.q_stride_s,
      p.q_stride_s, at.seq_q() - first_query);
  KeyWalk walk(keys_of(at, tokens_from(first_query, BLOCK_Q)));
  load_keys(walk);
  if constexpr (STAGES == 2)
    load_values(walk);

  const int warp_query = first_query + warp_id() * 16;
  const int query[2] = {warp_query + row_in_warp, warp_query + row_in_warp + 8};
  float score_scale[2]; // of a query's scores, in log2 units
#pragma unroll
  for (int r = 0; r < 2; ++r)
    score_scale[r] = QK16 ? p.softmax_scale * LOG2_E
                          : read_row(p.q_rows, at.padded_query(), query[r], ROW_SCALE);

  ScoreRows queries;
  float o[HEAD_DIM / 8][4] = {};
  RowState rows[2];

  const auto scores = [&](float(&x)[COLUMNS8][4], const KeyWalk& walk) {
    const u32 keys = shared + SharedLayout::KEYS + walk.stage() * SharedLayout::KEYS_BYTES;
    Scores::Sum sums[COLUMNS8][4];
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile)
      issue_scores(&sums[tile * 8], queries, keys + tile * TOKENS_PER_TILE * SCORE_ROW_BYTES);
    finish<0>(sums);
    scale_columns(
        x, sums, shared + SharedLayout::KEY_SCALES + walk.stage() * SharedLayout::KEY_SCALES_BYTES);
    if (needs_mask(at, tokens_from(warp_query, 16), tokens_from(walk.first(), GROUP_KV)))
      mask(x, [&](int r, int column) { return hidden(at, query[r], walk.first() + column); });
  };

  for (; walk.more(); walk = walk.next()) {
    const int stage = walk.stage();

    wait_for_tiles();
    if constexpr (STAGES == 2)
      load_keys(walk.next());
    load_values(STAGES == 2 ? walk.next() : walk);
    if (walk.count == 0)
      queries.load(shared + SharedLayout::QUERIES, warp_id() * 16);

    float x[COLUMNS8][4];
    scores(x, walk);
    float alpha[2], beta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows[r].softmax(x, r, score_scale[r], alpha[r], beta[r]);
    u32 p8[GROUP_KV / 32][4];
    quantize_fragments<false, GROUP_KV / 32>(p8, x, 1.0f, 1.0f);
    rescale(o, alpha);

    if constexpr (STAGES == 1) {
      wait_for_tiles();
      load_keys(walk.next());
    }
    TokenProducts<false, GROUP_KV / 32> p_v;
    p_v.issue(p8, shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES);
    p_v.template add_to<0>(
        o, shared + SharedLayout::CHANNEL_SCALES + stage * SharedLayout::CHANNEL_SCALES_BYTES,
        beta[0], beta[1]);
  }
  cp_async_wait<0>();

  float inverse_sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows[r].sum);
    const bool blind = sees_nothing(at, query[r]);
    inverse_sum[r] = blind ? 0.0f : __fdiv_rn(1.0f, sum);
    if (quad_lane == 0 && query[r] < at.seq_q()) {
      float lse = LN_2 * (rows[r].maximum + log2_approx(sum) - LOG2_UNSIGNED_LEVELS);
      if constexpr (USES_MEAN)
        lse += read_row(p.q_rows, at.padded_query(), query[r],
                        ROW_SHIFT); // back to the raw domain
      p.lse[at.first_row() + query[r]] = blind ? -INFINITY_F : lse;
    }
  }
  store_rows(p.out + at.first_query(p.out_stride_b) + at.head * p.out_stride_h +
                 warp_query * p.out_stride_s,
             p.out_stride_s, at.seq_q() - warp_query, o, inverse_sum[0], inverse_sum[1]);
}
