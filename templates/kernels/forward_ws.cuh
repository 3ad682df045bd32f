//===- kernels/forward_ws.cuh - O and lse, warp-specialised, sm_90a --------------===//
//
// This kernel computes what kernels/forward.cuh computes, bit for bit, by warps of different
// duties. One thread (the producer) copies tiles of K and V in bulk into a ring of stages;
// warpgroups of 64 queries each read them. Before a warpgroup starts S of a group it waits until
// its neighbour's S is there. So warpgroups ping-pong at the tensor cores, and the softmax of one
// runs beside products of another.
//
// Lists are short, and what a block does before its first tile and behind its last one takes as
// long as three tiles. So over lists it takes several blocks of queries, work tiles
// (tile/walk/tile_messages.cuh). The ring and the ping-pong go on from one to the next, and queries
// have a ring of their own.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/forward_ws.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/math/output.cuh"
#include "tile/math/products.cuh"
#include "tile/math/softmax.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/ping_pong.cuh"
#include "tile/walk/roles.cuh"
#include "tile/walk/tile_messages.cuh"
#include "tile/walk/tiles.cuh"

static_assert(!QK16, "bulk copies bring swizzled tiles, which the 8-bit copies are");

constexpr int KEY_TILES = GROUP_KV / TOKENS_PER_TILE;
constexpr int WARPGROUPS = BLOCK_Q / 64; ///< that consume
constexpr ForwardWsLayout LAYOUT(SHAPE);
constexpr int CHANNEL_SCALES_BYTES = LAYOUT.channel_scales_bytes,
              SCALE_BUFFERS = LAYOUT.scale_buffers;

using KeyRing = Ring<BLOCK_Q / 16>;
using QueryRing = Ring<BLOCK_Q / 16, LAYOUT.query_stages>; ///< a stage has those of a work tile

using Tiles = KeyTiles<GROUP_KV, GROUPS_A_RUN>;

__device__ __forceinline__ u32 scale_buffer(u32 shared, int buffer, int vector) {
  return shared + LAYOUT.channel_scales + buffer * CHANNEL_SCALES_BYTES + vector * HEAD_DIM * 4;
}

__device__ __forceinline__ u32 message_address(u32 shared, const RingState& state) {
  return shared + LAYOUT.messages + state.stage * LAYOUT.message_bytes;
}

__device__ __forceinline__ int buffer_behind(int buffer) {
  return buffer + 1 < SCALE_BUFFERS ? buffer + 1 : 0;
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query, WorkTile& work_tile) {
  const KeyRing ring = {shared + LAYOUT.barriers};
  const QueryRing of_queries = {shared + LAYOUT.queries_came};
  const QueryRing::State own(work_tile.before);
  if constexpr (HAS_LISTS)
    of_queries.wait_until_empty(own);
  const u32 came = of_queries.full(own);
  const int queries = minimum(BLOCK_Q, at.padded_q() - first_query);
  arrive_expecting(came, queries * HEAD_DIM);
  bulk_copy(shared + LAYOUT.queries + own.stage * (BLOCK_Q * HEAD_DIM),
            p.q8 + (at.padded_query() + first_query) * HEAD_DIM, queries * HEAD_DIM, came);

  const s8* keys = p.k8 + at.padded_key() * HEAD_DIM;
  const s8* values = p.vt8 + at.padded_key() * HEAD_DIM;
  const float* key_scales = p.k8_scale + at.padded_key() / KEYS_A_SCALE;
#pragma unroll 1
  for (Tiles tile(at, tokens_from(first_query, BLOCK_Q)); tile.more(); tile = tile.next()) {
    const RingState state(HAS_LISTS ? work_tile.tiles++ : tile.count());
    const u32 full = ring.full(state);
    const bool has_scales = !BLOCK_SCALES && tile.begins_run();
    if (HAS_LISTS && tile.begins_run())
      work_tile.buffer = buffer_behind(work_tile.buffer);
    ring.begin_filling(state,
                       LAYOUT.keys_bytes + LAYOUT.values_bytes + KEY_SCALES_BYTES +
                           (has_scales ? CHANNEL_SCALES_BYTES : 0),
                       message_address(shared, state),
                       TileMessage(tile.number, tile.changes_run(), work_tile.buffer,
                                   hides_part(at, at.head, first_query, tile.first_key()))
                           .bits);
    bulk_copy(shared + LAYOUT.keys + state.stage * LAYOUT.keys_bytes,
              keys + static_cast<s64>(tile.number) * LAYOUT.keys_bytes, LAYOUT.keys_bytes, full);
    bulk_copy(shared + LAYOUT.key_scales + state.stage * KEY_SCALES_BYTES,
              key_scales + tile.first_key() / 128 * (128 / KEYS_A_SCALE), KEY_SCALES_BYTES, full);
    // The run that had this buffer is over: this stage was released after the run behind it had
    // begun.
    if (has_scales)
      bulk_copy(
          scale_buffer(shared, HAS_LISTS ? work_tile.buffer : tile.buffer<SCALE_BUFFERS>(), 0),
          channel_scales_of(p, at, tile.run()), CHANNEL_SCALES_BYTES, full);
    bulk_copy(shared + LAYOUT.values + state.stage * LAYOUT.values_bytes,
              values + static_cast<s64>(tile.number) * LAYOUT.values_bytes, LAYOUT.values_bytes,
              full);
  }
  if constexpr (HAS_LISTS) {
    const RingState state(work_tile.tiles++);
    ring.begin_filling(state, 0, message_address(shared, state),
                       TileMessage::end(buffer_behind(work_tile.buffer)).bits);
  }
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query, WorkTile& work_tile) {
  const int lane = lane_id();
  const KeyRing ring = {shared + LAYOUT.barriers};

  SoftmaxRows rows;
  Sums o;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A block may be longer than what is padded; what its last rows read does not matter.
    const int query = minimum(first_query + warp_id() * 16 + lane / 4 + 8 * r, at.padded_q() - 1);
    rows.score_scale[r] = read_row(p.q_rows, at.padded_query(), query, ROW_SCALE);
    if constexpr (BENDS_SCORES && USES_MEAN)
      rows.subtracted[r] = LOG2_E * read_row(p.q_rows, at.padded_query(), query, ROW_SHIFT);
    if constexpr (SINK_KEYS)
      rows.start_from(r, read_row(p.q_rows, at.padded_query(), query, ROW_SINK));
  }
  if constexpr (SINK_KEYS)
    start_from_sink(o, p, at);

  // As descriptors have it, or as addresses: measured, the one is 2 % faster at 128 channels, with
  // 34 instructions a group fewer, and 3 % slower at 64, with 25 fewer.
  const auto operand = [&](int offset, int number, int bytes) {
    if constexpr (HEAD_DIM == 64)
      return shared + offset + number * bytes;
    else
      return (TilesDescriptor(shared) + offset).at(number, bytes);
  };
  struct Rows {
    decltype(operand(0, 0, 0)) tile;
  };
  const QueryRing of_queries = {shared + LAYOUT.queries_came};
  const QueryRing::State own_state(work_tile.before);
  const int rows64 = warp_id() / 4 + own_state.stage * WARPGROUPS;
  const Rows queries = {operand(LAYOUT.queries, HEAD_DIM == 64 ? rows64 : common_to_warp(rows64),
                                64 * SCORE_ROW_BYTES)};
  wait_for_phase(of_queries.full(own_state), own_state.parity);

  // What depends on the block's and the warpgroup's number is computed where it is needed, because
  // registers are short.
  const auto reread_first_query = [&] {
    return HAS_LISTS ? work_tile.first_query<BLOCK_Q>(p) : reread_block_of_queries() * BLOCK_Q;
  };
  const auto own = [&] {
    return tokens_from(reread_first_query() + reread_thread() / 128 * 64, 64);
  };
  const auto of_block = [&] { return tokens_from(reread_first_query(), BLOCK_Q); };
  const auto message_at = [&](int count) {
    const RingState state(count);
    ring.wait_until_full(state);
    return message_address(shared, state);
  };
  ConsumedKeyTiles<GROUP_KV, GROUPS_A_RUN, decltype(of_block), decltype(own), decltype(message_at)>
      walk(at, of_block, own, message_at, work_tile.tiles);
  const MagicProduct start(shared + LAYOUT.magics);
  const PingPong<WARPGROUPS, 1> ping_pong;
  const auto process_keys = [&](const auto& hidden) {
    float block_scale = 1;
    if constexpr (BLOCK_SCALES)
      block_scale = __ldg(channel_scales_of(p, at, walk.number()));
    const RingState state(walk.count());
    if constexpr (!HAS_LISTS) // else it has waited for its message
      ring.wait_until_full(state);
    float key_scale[KEY_SCALES];
    read_key_scales(key_scale, shared + LAYOUT.key_scales + state.stage * KEY_SCALES_BYTES,
                    GROUP_KV == 128 ? 0
                                    : walk.number()); // its parity counts if a group has 64 keys

    Scores::Sum sums[COLUMNS8][4];
    ping_pong.wait();
    issue_scores<KEY_TILES>(sums, queries, operand(LAYOUT.keys, state.stage, LAYOUT.keys_bytes),
                            start);
    finish<0>(sums);
    ping_pong.signal();
    float largest[2], beta[2];
    float completed[COLUMNS8][4]; // by the score function
    auto& scores = rows.complete(sums, completed, key_scale, nullptr, at,
                                 HAS_SCORE ? reread_first_query() : 0, walk.number() * GROUP_KV);
    rows.update_row_max<HAS_LISTS>(largest, beta, o, scores, key_scale, hidden);
    u32 p8[KEY_SCALES][4];
    rows.quantize_p(p8, scores, key_scale, largest, beta, hidden);

    constexpr int PARTS = HEAD_DIM / PRODUCT_CHANNELS;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      TokenProducts<false, GROUP_KV / 32> p_v;
      p_v.issue(p8, operand(LAYOUT.values, state.stage, LAYOUT.values_bytes), part);
      p_v.finish();
      if (part == PARTS - 1)
        ring.release(state);
      p_v.add_finished_to(o, beta[0] * block_scale, beta[1] * block_scale, part);
    }
    walk.advance();
  };

  if (!HAS_LISTS || work_tile.before == 0)
    ping_pong.begin();
  for (;;) {
    const auto tile = walk.tile();
    if (!tile.more())
      break;
    const Range unmasked = walk.unmasked();
    if (tile.changes_run()) {
      if constexpr (BLOCK_SCALES) {
        o.subtract_bias();
      } else {
        if constexpr (!HAS_LISTS)
          ring.wait_until_full(RingState(walk.count())); // the run's scales come with the group
        o.rescale_columns_of_warp(
            shared + LAYOUT.ratios + reread_thread() / 32 * (HEAD_DIM * 4),
            scale_buffer(shared, tile.buffer_before<SCALE_BUFFERS>(), CHANNEL_SCALE),
            scale_buffer(shared, tile.buffer<SCALE_BUFFERS>(), CHANNEL_INVERSE));
      }
    }
    if (tile.is_in(unmasked)) {
      const int stop = tile.end_of_run_in(unmasked);
      do
        process_keys(NoneHidden());
      while (walk.count() < stop);
    } else {
      const int thread = reread_thread();
      const int query = own().begin + thread % 128 / 32 * 16 + thread % 32 / 4;
      process_keys(KeysHiddenFrom<COLUMNS8>(at, query, tile.first_key(), SINK_KEYS));
    }
  }
  if constexpr (BLOCK_SCALES)
    o.subtract_bias();
  else
    o.multiply_columns(scale_buffer(shared, walk.last_buffer<SCALE_BUFFERS>(), CHANNEL_SCALE));
  // Groups that only other warpgroups see are passed on.
  for (; walk.is_in_ring(); walk.advance()) {
    const RingState state(walk.count());
    ring.wait_until_full(state);
    ping_pong.wait();
    ping_pong.signal();
    ring.release(state);
  }
  if constexpr (HAS_LISTS) {
    const RingState state(walk.count()); // of the message that there is no more
    ring.release(state);
    of_queries.release(own_state);
    work_tile.tiles = walk.count() + 1;
  }
  store(p, rows, o, HAS_LISTS ? work_tile.first_query<BLOCK_Q>(p) : block_of_queries() * BLOCK_Q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const QueryHead at = query_head(p);
  const int first_query = block_of_queries() * BLOCK_Q;
  const auto for_work_tiles = [&](const auto& work) {
    WorkTile work_tile;
    do
      work(p, shared, at, HAS_LISTS ? work_tile.first_query<BLOCK_Q>(p) : first_query, work_tile);
    while (work_tile.next<BLOCK_Q>(p));
  };

  run_roles<BLOCK_Q / 16>(
      [&] {
        KeyRing{shared + LAYOUT.barriers}.init();
        if constexpr (HAS_LISTS)
          QueryRing{shared + LAYOUT.queries_came}.init();
        else
          init_mbarrier(shared + LAYOUT.queries_came, 1);
      },
      [&] {
        MagicProduct::write(shared + LAYOUT.magics);
        fence_async_proxy();
      },
      [&] { for_work_tiles([](auto&&... x) { produce(x...); }); },
      [&] { for_work_tiles([](auto&&... x) { consume(x...); }); });
}
