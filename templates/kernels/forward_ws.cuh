//===- kernels/forward_ws.cuh - O and lse, warp-specialised, sm_90a --------------===//
//
// This kernel computes what kernels/forward.cuh computes, bit for bit, by warps of different
// duties. One thread copies tiles of K and V in bulk into a ring of stages; warpgroups of 64
// queries each read them. Before a warpgroup starts S of a group it waits until its neighbour's S
// is there. So warpgroups take turns at the tensor cores, and the softmax of one runs beside
// products of another.
//
// Lists are short, and what a block does before its first tile and behind its last one takes as
// long as three tiles. So over lists it takes several blocks of queries, items
// (tile/work/notes.cuh). The ring and the turns go on from one to the next, and queries have a ring
// of their own.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/forward_ws.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/math/output.cuh"
#include "tile/math/products.cuh"
#include "tile/math/softmax.cuh"
#include "tile/memory/ring.cuh"
#include "tile/work/notes.cuh"
#include "tile/work/roles.cuh"
#include "tile/work/tiles.cuh"
#include "tile/work/turns.cuh"

static_assert(!QK16, "bulk copies bring images, which the 8-bit copies are");

constexpr int KEY_TILES = GROUP_KV / TOKENS_PER_TILE;
constexpr int WARPGROUPS = BLOCK_Q / 64; ///< that consume
constexpr ForwardWsLayout LAYOUT(SHAPE);
constexpr int UNIT_BYTES = LAYOUT.unit_bytes, UNIT_SLOTS = LAYOUT.unit_slots;

using KeyRing = Ring<BLOCK_Q / 16>;
using QueryRing = Ring<BLOCK_Q / 16, LAYOUT.query_slots>; ///< a stage has those of an item

using Tiles = KeyTiles<GROUP_KV, GROUPS_A_RUN>;

__device__ __forceinline__ u32 unit_place(u32 shared, int slot, int vector) {
  return shared + LAYOUT.units + slot * UNIT_BYTES + vector * HEAD_DIM * 4;
}

__device__ __forceinline__ u32 note_place(u32 shared, const RingPlace& place) {
  return shared + LAYOUT.notes + place.stage * LAYOUT.note_bytes;
}

__device__ __forceinline__ int slot_behind(int slot) {
  return slot + 1 < UNIT_SLOTS ? slot + 1 : 0;
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query, Item& item) {
  const KeyRing ring = {shared + LAYOUT.barriers};
  const QueryRing of_queries = {shared + LAYOUT.queries_came};
  const QueryRing::Place own(item.before);
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
    const RingPlace place(HAS_LISTS ? item.tiles++ : tile.count());
    const u32 full = ring.full(place);
    const bool has_unit = !BLOCK_SCALES && tile.begins_run();
    if (HAS_LISTS && tile.begins_run())
      item.slot = slot_behind(item.slot);
    ring.begin_filling(
        place,
        LAYOUT.keys_bytes + LAYOUT.values_bytes + KEY_SCALES_BYTES + (has_unit ? UNIT_BYTES : 0),
        note_place(shared, place), TileNote(tile.number, tile.changes_run(), item.slot).bits);
    bulk_copy(shared + LAYOUT.keys + place.stage * LAYOUT.keys_bytes,
              keys + static_cast<s64>(tile.number) * LAYOUT.keys_bytes, LAYOUT.keys_bytes, full);
    bulk_copy(shared + LAYOUT.key_scales + place.stage * KEY_SCALES_BYTES,
              key_scales + tile.first_key() / 128 * (128 / KEYS_A_SCALE), KEY_SCALES_BYTES, full);
    // The run that had this slot is over: this stage was released after the run behind it had
    // begun.
    if (has_unit)
      bulk_copy(unit_place(shared, HAS_LISTS ? item.slot : tile.slot<UNIT_SLOTS>(), 0),
                channel_scales_of(p, at, tile.run()), UNIT_BYTES, full);
    bulk_copy(shared + LAYOUT.values + place.stage * LAYOUT.values_bytes,
              values + static_cast<s64>(tile.number) * LAYOUT.values_bytes, LAYOUT.values_bytes,
              full);
  }
  if constexpr (HAS_LISTS) {
    const RingPlace place(item.tiles++);
    ring.begin_filling(place, 0, note_place(shared, place),
                       TileNote::end(slot_behind(item.slot)).bits);
  }
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query, Item& item) {
  const int lane = lane_id();
  const KeyRing ring = {shared + LAYOUT.barriers};

  SoftmaxRows rows;
  Sums o;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A block may be longer than what is padded; what its last rows read does not matter.
    const int query = minimum(first_query + warp_id() * 16 + lane / 4 + 8 * r, at.padded_q() - 1);
    rows.score_scale[r] = read_row(p.q_rows, at.padded_query(), query, ROW_SCALE);
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
      return (TilesPlace(shared) + offset).at(number, bytes);
  };
  struct Rows {
    decltype(operand(0, 0, 0)) tile;
  };
  const QueryRing of_queries = {shared + LAYOUT.queries_came};
  const QueryRing::Place own_place(item.before);
  const int rows64 = warp_id() / 4 + own_place.stage * WARPGROUPS;
  const Rows queries = {operand(LAYOUT.queries, HEAD_DIM == 64 ? rows64 : common_to_warp(rows64),
                                64 * SCORE_ROW_BYTES)};
  wait_for_phase(of_queries.full(own_place), own_place.parity);

  // What follows from the block's and the warpgroup's place is computed where it is needed:
  // registers are short.
  const auto first_query_anew = [&] {
    return HAS_LISTS ? item.first_query<BLOCK_Q>(p) : block_of_queries_anew() * BLOCK_Q;
  };
  const auto own = [&] {
    return tokens_from(first_query_anew() + read_thread_anew() / 128 * 64, 64);
  };
  const auto of_block = [&] { return tokens_from(first_query_anew(), BLOCK_Q); };
  const auto note = [&](int count) {
    const RingPlace place(count);
    ring.wait_until_full(place);
    return note_place(shared, place);
  };
  ConsumedKeyTiles<GROUP_KV, GROUPS_A_RUN, decltype(of_block), decltype(own), decltype(note)> walk(
      at, of_block, own, note, item.tiles);
  const MagicProduct start(shared + LAYOUT.magics);
  const Turns<WARPGROUPS, 1> turns;
  const auto take_group = [&](const auto& hidden) {
    float unit = 1;
    if constexpr (BLOCK_SCALES)
      unit = __ldg(channel_scales_of(p, at, walk.number()));
    const RingPlace place(walk.count());
    if constexpr (!HAS_LISTS) // else for its note it has waited
      ring.wait_until_full(place);
    float key_scale[KEY_SCALES];
    read_key_scales(key_scale, shared + LAYOUT.key_scales + place.stage * KEY_SCALES_BYTES,
                    GROUP_KV == 128 ? 0
                                    : walk.number()); // its parity counts if a group has 64 keys

    Scores::Sum sums[COLUMNS8][4];
    turns.take();
    issue_scores<KEY_TILES>(sums, queries, operand(LAYOUT.keys, place.stage, LAYOUT.keys_bytes),
                            start);
    finish<0>(sums);
    turns.pass();
    float largest[2], beta[2];
    rows.take_maxima<HAS_LISTS>(largest, beta, o, sums, key_scale, hidden);
    u32 p8[KEY_SCALES][4];
    rows.take_scores(p8, sums, key_scale, largest, beta, hidden);

    constexpr int PARTS = HEAD_DIM / PRODUCT_CHANNELS;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      TokenProducts<false, GROUP_KV / 32> p_v;
      p_v.issue(p8, operand(LAYOUT.values, place.stage, LAYOUT.values_bytes), part);
      p_v.finish();
      if (part == PARTS - 1)
        ring.release(place);
      p_v.add_finished_to(o, beta[0] * unit, beta[1] * unit, part);
    }
    walk.advance();
  };

  if (!HAS_LISTS || item.before == 0)
    turns.begin();
  for (;;) {
    const auto tile = walk.tile();
    if (!tile.more())
      break;
    const Range unmasked = walk.unmasked();
    if (tile.changes_run()) {
      if constexpr (BLOCK_SCALES) {
        o.settle();
      } else {
        if constexpr (!HAS_LISTS)
          ring.wait_until_full(RingPlace(walk.count())); // the run's scales come with the group
        o.change_units_of_warp(shared + LAYOUT.ratios + read_thread_anew() / 32 * (HEAD_DIM * 4),
                               unit_place(shared, tile.slot_before<UNIT_SLOTS>(), CHANNEL_SCALE),
                               unit_place(shared, tile.slot<UNIT_SLOTS>(), CHANNEL_INVERSE));
      }
    }
    if (tile.is_in(unmasked)) {
      const int stop = tile.end_of_run_in(unmasked);
      do
        take_group(NoneHidden());
      while (walk.count() < stop);
    } else {
      const int thread = read_thread_anew();
      const int query = own().begin + thread % 128 / 32 * 16 + thread % 32 / 4;
      take_group(HiddenKeys(at, query, tile.first_key(), SINK_KEYS));
    }
  }
  if constexpr (BLOCK_SCALES)
    o.settle();
  else
    o.multiply_columns(unit_place(shared, walk.last_slot<UNIT_SLOTS>(), CHANNEL_SCALE));
  // Groups that only other warpgroups see are passed on.
  for (; walk.is_in_ring(); walk.advance()) {
    const RingPlace place(walk.count());
    ring.wait_until_full(place);
    turns.take();
    turns.pass();
    ring.release(place);
  }
  if constexpr (HAS_LISTS) {
    const RingPlace place(walk.count()); // of the note that there is no more
    ring.release(place);
    of_queries.release(own_place);
    item.tiles = walk.count() + 1;
  }
  store(p, rows, o, HAS_LISTS ? item.first_query<BLOCK_Q>(p) : block_of_queries() * BLOCK_Q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_queries<BLOCK_Q>(p, store_without_keys))
    return;
  const QueryHead at = query_head(p);
  const int first_query = block_of_queries() * BLOCK_Q;
  const auto for_items = [&](const auto& work) {
    Item item;
    do
      work(p, shared, at, HAS_LISTS ? item.first_query<BLOCK_Q>(p) : first_query, item);
    while (item.next<BLOCK_Q>(p));
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
      [&] { for_items([](auto&&... x) { produce(x...); }); },
      [&] { for_items([](auto&&... x) { consume(x...); }); });
}
