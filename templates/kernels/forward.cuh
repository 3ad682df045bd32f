//===- kernels/forward.cuh - O and lse ------------------------------------------===//
//
// SageBwd, Algorithm 1. One block takes BLOCK_Q queries of one head, 16 a warp, and walks over the
// keys a quantisation group (GROUP_KV) at a time:
//   S = Q K^T            INT8 (16-bit under qk16), one scale a query and one for 8 keys
//   P = exp(S - rowmax)  quantised with the constant scale 1/255: the row's maximum is 1
//   O = O + beta P V     unsigned x signed INT8; O is in units of V's channel scales, which change
//                        every CHANNEL_TOKENS_KV keys
// A group's P is taken against its own maximum and beta brings it to the row's reference
// (tile/softmax.cuh). With SINK_KEYS a row starts from key 0, whose P is 1 and V in FP32; in its
// group it is hidden.
//
// Masks and tails are apart: most groups run through a loop that knows of neither.
//
// With STAGES = 2 shared memory holds the next group's keys and values while this one's are worked
// on. With STAGES = 1 there is one copy: K and V are refilled in turn.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/mean_scores.cuh"
#include "tile/output.cuh"
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
  /// Of two units.
  static constexpr int CHANNEL_SCALES = VALUES + STAGES * VALUES_BYTES;
  static constexpr int CHANNEL_SCALES_BYTES = CHANNEL_VECTORS * HEAD_DIM * 4;
  static constexpr int TOTAL = CHANNEL_SCALES + (BLOCK_SCALES ? 0 : 2 * CHANNEL_SCALES_BYTES);
};
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");

using KeyWalk = Walk<GROUP_KV>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  begin_in_stream_order();
  if (!enter_queries<BLOCK_Q>(p, store_without_keys))
    return;
  const int lane = lane_id();

  const int block = block_of_queries(), first_query = block * BLOCK_Q;
  const QueryHead at = query_head(p);
  s64 head_keys = at.padded_key();
  asm("" : "+l"(head_keys)); // what is derived from it is not kept
  const auto channel_scales = [&](int unit) {
    return channel_scales_of(p, BLOCK_SCALES ? at : query_head_anew(p), unit);
  };

  const auto load_keys = [&](const KeyWalk& walk) {
    if (walk.more()) {
      const u32 tile = shared + SharedLayout::KEYS + walk.stage() * SharedLayout::KEYS_BYTES;
      const int first = walk.first();
      if constexpr (QK16)
        load_tile<GROUP_KV, SCORE_ROW_BYTES, THREADS>(
            tile,
            p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h +
                first * p.k_stride_s,
            p.k_stride_s * 2, at.seq_kv() - first, p.channels);
      else
        load_image<SharedLayout::KEYS_BYTES>(tile, p.k8, (head_keys + first) * HEAD_DIM);
    }
    cp_async_commit();
  };
  const auto load_values = [&](const KeyWalk& walk) {
    if (walk.more())
      load_image<SharedLayout::VALUES_BYTES>(shared + SharedLayout::VALUES +
                                                 walk.stage() * SharedLayout::VALUES_BYTES,
                                             p.vt8, (head_keys + walk.first()) * HEAD_DIM);
    cp_async_commit();
  };
  const auto unit_place = [&](int unit, int vector) {
    return shared + SharedLayout::CHANNEL_SCALES + (unit & 1) * SharedLayout::CHANNEL_SCALES_BYTES +
           vector * HEAD_DIM * 4;
  };
  const auto load_unit = [&](int unit) {
    load_floats<CHANNEL_VECTORS * HEAD_DIM, THREADS>(unit_place(unit, 0), channel_scales(unit));
  };

  KeyWalk walk(keys_of(at, tokens_from(first_query, BLOCK_Q)));
  const int first_visit = WINDOW ? walk.tile / VISIT_GROUPS : 0;
  load_score_rows<BLOCK_Q>(shared + SharedLayout::QUERIES,
                           p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
                           p.q + at.first_query(p.q_stride_b, p.q_stride_s) +
                               at.head * p.q_stride_h + first_query * p.q_stride_s,
                           p.q_stride_s, at.seq_q() - first_query, p.channels);
  load_keys(walk);
  if constexpr (STAGES == 2)
    load_values(walk);
  if constexpr (!BLOCK_SCALES) {
    load_unit(first_visit);
    if (walk.end > (first_visit + 1) * VISIT_GROUPS)
      load_unit(first_visit + 1);
    cp_async_commit();
  }

  SoftmaxRows rows;
  Sums o;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + warp_id() * 16 + lane / 4 + 8 * r;
    rows.score_scale[r] =
        QK16 ? p.softmax_scale * LOG2_E : read_row(p.q_rows, at.padded_query(), query, ROW_SCALE);
    if constexpr (SINK_KEYS)
      rows.start_from(r, read_row(p.q_rows, at.padded_query(), query, ROW_SINK));
  }
  if constexpr (SINK_KEYS)
    start_from_sink(o, p, at);

  ScoreRows queries;
  wait_for_tiles();
  queries.load(shared + SharedLayout::QUERIES, warp_id() * 16);

  const auto take_group = [&](const auto& hidden) {
    const int stage = walk.stage();
    float key_scale[KEY_SCALES];
    read_key_scales(key_scale, p, head_keys + walk.first());
    float unit = 1;
    if constexpr (BLOCK_SCALES)
      unit = __ldg(channel_scales(walk.tile));

    wait_for_tiles();
    if constexpr (STAGES == 2)
      load_keys(walk.next());
    load_values(STAGES == 2 ? walk.next() : walk);

    Scores::Sum sums[COLUMNS8][4];
    issue_scores<KEY_TILES>(sums, queries,
                            shared + SharedLayout::KEYS + stage * SharedLayout::KEYS_BYTES);
    finish<0>(sums);
    float largest[2], beta[2];
    float completed[COLUMNS8][4]; // of smoothed queries
    auto& scores =
        rows.complete(sums, completed, key_scale, mean_scores_of(at, first_query, walk.first()));
    rows.take_maxima(largest, beta, o, scores, key_scale, hidden);
    u32 p8[KEY_SCALES][4];
    rows.take_scores(p8, scores, key_scale, largest, beta, hidden);

    if constexpr (STAGES == 1) {
      wait_for_tiles();
      load_keys(walk.next());
    }
#pragma unroll
    for (int part = 0; part < HEAD_DIM / PRODUCT_CHANNELS; ++part) {
      TokenProducts<false, GROUP_KV / 32> p_v;
      p_v.issue(p8,
                shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES + token_lane(),
                part);
      p_v.template add_to<0>(o, beta[0] * unit, beta[1] * unit, part);
    }
    walk = walk.next();
  };

  const Range unmasked = unmasked_tiles_of<GROUP_KV>(at, tokens_from(first_query, BLOCK_Q));
  while (walk.more()) {
    const int visit = walk.tile / VISIT_GROUPS;
    if (walk.tile % VISIT_GROUPS == 0 && (WINDOW ? walk.count : walk.tile) > 0) {
      if constexpr (BLOCK_SCALES) {
        o.settle();
      } else {
        const u32 ratios = unit_place(visit - 1, CHANNEL_INVERSE); // whose units are none any more
        form_ratios<THREADS>(ratios, unit_place(visit - 1, CHANNEL_SCALE),
                             unit_place(visit, CHANNEL_INVERSE), threadIdx.x);
        __syncthreads();
        o.multiply_columns(ratios);
        __syncthreads(); // the old unit's place is the next one's
        if ((visit + 1) * VISIT_GROUPS < walk.end)
          load_unit(visit + 1);
      }
    }
    if (walk.tile >= unmasked.begin && walk.tile < unmasked.end) {
      const int stop = minimum(unmasked.end, (visit + 1) * VISIT_GROUPS);
      do
        take_group(NoneHidden());
      while (walk.tile < stop);
    } else {
      const int thread = read_thread_anew();
      const int query = first_query + thread / 32 * 16 + (thread & 31) / 4;
      take_group(HiddenKeys(at, query, walk.first(), SINK_KEYS));
    }
  }
  cp_async_wait<0>();
  if constexpr (BLOCK_SCALES)
    o.settle();
  else
    o.multiply_columns(unit_place(maximum(0, walk.end - 1) / VISIT_GROUPS, CHANNEL_SCALE));

  store(p, rows, o);
}
