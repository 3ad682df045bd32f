//===- kernels/forward.cuh - O and lse ------------------------------------------===//
//
// SageBwd, Algorithm 1. A block takes BLOCK_Q queries of one head, 16 a warp, and walks over the
// keys, a quantisation group of GROUP_KV keys at a time:
//   S = Q K^T            INT8 (16-bit under qk16), one scale a query and one for 8 keys
//   P = exp(S - rowmax)  quantised with the constant scale 1/255: the row's maximum is 1
//   O = O + beta P V     unsigned x signed INT8; O is in units of V's channel scales, which
//   change
//                        every CHANNEL_TOKENS_KV keys
// A group's P is relative to the maximum of the group; beta makes it relative to the reference of
// its row (tile/math/softmax.cuh). With SINK_KEYS a row starts from the attention sink, key 0,
// whose P is 1 and whose V is in FP32; the group of key 0 hides it.
//
// Most groups need no mask. They run through a loop of their own, which asks for none.
//
// If STAGES = 2, shared memory holds the keys and values of the next group beside those of this
// one. If STAGES = 1, there is one place for each of both: K and V are loaded in turn.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/forward.cuh"
#include "ptx/stream_order.cuh"
#include "tile/math/mean_scores.cuh"
#include "tile/math/output.cuh"
#include "tile/math/products.cuh"
#include "tile/math/softmax.cuh"
#include "tile/walk/tiles.cuh"

constexpr int KEY_TILES = GROUP_KV / TOKENS_PER_TILE;
constexpr ForwardLayout LAYOUT(SHAPE);
constexpr int SCALE_BUFFERS = LAYOUT.scale_buffers;

using Tiles = KeyTiles<GROUP_KV, GROUPS_A_RUN>;

__device__ __forceinline__ int stage_of(const Tiles& tile) { return tile.count() % STAGES; }

/// Starts copies to shared memory. keys() and values() each end a group of them.
struct Loads {
  const Params& p;
  const QueryHead& at;
  u32 shared;
  const s64& head_keys; ///< where the head's keys begin in the padded copies

  __device__ __forceinline__ void own_rows(int first_query) const {
    load_score_rows<BLOCK_Q>(shared + LAYOUT.queries,
                             p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
                             p.q + at.first_query(p.q_stride_b, p.q_stride_s) +
                                 at.head * p.q_stride_h + first_query * p.q_stride_s,
                             p.q_stride_s, at.seq_q() - first_query, p.channels);
  }
  __device__ __forceinline__ void keys(const Tiles& tile) const {
    if (tile.more()) {
      const u32 to = shared + LAYOUT.keys + stage_of(tile) * LAYOUT.keys_bytes;
      const int first = tile.first_key();
      if constexpr (QK16)
        load_tile<GROUP_KV, SCORE_ROW_BYTES, THREADS>(
            to,
            p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h +
                first * p.k_stride_s,
            p.k_stride_s * 2, at.seq_kv() - first, p.channels);
      else
        load_swizzled<LAYOUT.keys_bytes>(to, p.k8, (head_keys + first) * HEAD_DIM);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void values(const Tiles& tile) const {
    if (tile.more())
      load_swizzled<LAYOUT.values_bytes>(shared + LAYOUT.values +
                                             stage_of(tile) * LAYOUT.values_bytes,
                                         p.vt8, (head_keys + tile.first_key()) * HEAD_DIM);
    cp_async_commit();
  }
  /// Brings the scales of a run's channels to a buffer.
  __device__ __forceinline__ void block_scale(int run, int buffer) const {
    load_floats<CHANNEL_VECTORS * HEAD_DIM, THREADS>(scale_buffer(buffer, 0), channel_scales(run));
  }
  __device__ __forceinline__ u32 scale_buffer(int buffer, int vector) const {
    return shared + LAYOUT.channel_scales + buffer * LAYOUT.channel_scales_bytes +
           vector * HEAD_DIM * 4;
  }
  __device__ __forceinline__ const float* channel_scales(int block_scale) const {
    return channel_scales_of(p, BLOCK_SCALES ? at : reread_query_head(p), block_scale);
  }
};

/// Rescales O from the scales of the run before to those of the run that `tile` begins, or
/// subtracts its bias.
__device__ __forceinline__ void rescale_to_run(Sums& o, const Tiles& tile, const Loads& load) {
  if constexpr (BLOCK_SCALES) {
    o.subtract_bias();
  } else {
    const int last = tile.buffer_before<SCALE_BUFFERS>();
    const u32 ratios = load.scale_buffer(last, CHANNEL_INVERSE); // nobody needs these any more
    form_ratios<THREADS>(ratios, load.scale_buffer(last, CHANNEL_SCALE),
                         load.scale_buffer(tile.buffer<SCALE_BUFFERS>(), CHANNEL_INVERSE),
                         threadIdx.x);
    __syncthreads();
    o.multiply_columns(ratios);
    __syncthreads(); // the old scales' buffer is the next one's
    if (const int next = tile.next_run(); tile.has_run(next))
      load.block_scale(next, tile.buffer_behind<SCALE_BUFFERS>());
    if constexpr (HAS_LISTS)
      cp_async_commit(); // else they come behind the first tile of the run, before its last
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  begin_in_stream_order();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const int lane = lane_id();

  const int block = block_of_queries(), first_query = block * BLOCK_Q;
  const QueryHead at = query_head(p);
  s64 head_keys = at.padded_key();
  asm("" : "+l"(head_keys)); // what is derived from it is not kept
  const Loads load = {p, at, shared, head_keys};

  Tiles tile(at, tokens_from(first_query, BLOCK_Q));
  load.own_rows(first_query);
  load.keys(tile);
  if constexpr (STAGES == 2)
    load.values(tile);
  if constexpr (!BLOCK_SCALES) {
    load.block_scale(tile.run(), tile.buffer<SCALE_BUFFERS>());
    if (const int next = tile.next_run(); tile.has_run(next))
      load.block_scale(next, tile.buffer_behind<SCALE_BUFFERS>());
    cp_async_commit();
  }

  SoftmaxRows rows;
  Sums o;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + warp_id() * 16 + lane / 4 + 8 * r;
    rows.score_scale[r] =
        QK16 ? p.softmax_scale * LOG2_E : read_row(p.q_rows, at.padded_query(), query, ROW_SCALE);
    if constexpr (BENDS_SCORES && USES_MEAN)
      rows.subtracted[r] = LOG2_E * read_row(p.q_rows, at.padded_query(), query, ROW_SHIFT);
    if constexpr (SINK_KEYS)
      rows.start_from(r, read_row(p.q_rows, at.padded_query(), query, ROW_SINK));
  }
  if constexpr (SINK_KEYS)
    start_from_sink(o, p, at);

  ScoreRows queries;
  wait_for_tiles();
  queries.load(shared + LAYOUT.queries, warp_id() * 16);

  const auto process_keys = [&](const auto& hidden) {
    const int stage = stage_of(tile);
    float key_scale[KEY_SCALES];
    read_key_scales(key_scale, p, head_keys + tile.first_key());
    float block_scale = 1;
    if constexpr (BLOCK_SCALES)
      block_scale = __ldg(load.channel_scales(tile.number));

    wait_for_tiles();
    if constexpr (STAGES == 2)
      load.keys(tile.next());
    load.values(STAGES == 2 ? tile.next() : tile);

    Scores::Sum sums[COLUMNS8][4];
    issue_scores<KEY_TILES>(sums, queries, shared + LAYOUT.keys + stage * LAYOUT.keys_bytes);
    finish<0>(sums);
    float largest[2], beta[2];
    float completed[COLUMNS8][4]; // of smoothed queries
    auto& scores =
        rows.complete(sums, completed, key_scale, mean_scores_of(at, first_query, tile.first_key()),
                      at, first_query, tile.first_key());
    rows.update_row_max<HIDES_ANYWHERE>(largest, beta, o, scores, key_scale, hidden);
    u32 p8[KEY_SCALES][4];
    rows.quantize_p(p8, scores, key_scale, largest, beta, hidden);

    if constexpr (STAGES == 1) {
      wait_for_tiles();
      load.keys(tile.next());
    }
#pragma unroll
    for (int part = 0; part < HEAD_DIM / PRODUCT_CHANNELS; ++part) {
      TokenProducts<false, GROUP_KV / 32> p_v;
      p_v.issue(p8, shared + LAYOUT.values + stage * LAYOUT.values_bytes + token_lane(), part);
      p_v.template add_to<0>(o, beta[0] * block_scale, beta[1] * block_scale, part);
    }
    tile = tile.next();
  };

  const Range unmasked = Tiles::unmasked(at, tokens_from(first_query, BLOCK_Q));
  while (tile.more()) {
    if (tile.changes_run())
      rescale_to_run(o, tile, load);
    if (tile.is_in(unmasked)) {
      const int stop = tile.end_of_run_in(unmasked);
      do
        process_keys(NoneHidden());
      while (tile.count() < stop);
    } else {
      const int thread = reread_thread();
      const int query = first_query + thread / 32 * 16 + (thread & 31) / 4;
      process_keys(KeysHiddenFrom<COLUMNS8>(at, query, tile.first_key(), SINK_KEYS));
    }
  }
  cp_async_wait<0>();
  if constexpr (BLOCK_SCALES)
    o.subtract_bias();
  else
    o.multiply_columns(load.scale_buffer(tile.last_buffer<SCALE_BUFFERS>(), CHANNEL_SCALE));

  store(p, rows, o);
}
