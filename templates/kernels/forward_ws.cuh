//===- kernels/forward_ws.cuh - O and lse, warp-specialised, sm_90a --------------===//
//
// This kernel computes what kernels/forward.cuh computes, bit for bit, by warps of different
// duties. One thread copies tiles of K and V in bulk into a ring of stages; warpgroups of 64
// queries each read them. Before a warpgroup starts S of a group it waits until its neighbour's S
// is there. So warpgroups take turns at the tensor cores, and the softmax of one runs beside
// products of another.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/output.cuh"
#include "tile/products.cuh"
#include "tile/ring.cuh"
#include "tile/roles.cuh"
#include "tile/softmax.cuh"
#include "tile/tiles.cuh"
#include "tile/turns.cuh"

static_assert(!QK16, "bulk copies bring images, which the 8-bit copies are");

constexpr int KEY_TILES = GROUP_KV / TOKENS_PER_TILE;
constexpr int WARPGROUPS = BLOCK_Q / 64; ///< that consume
constexpr int UNIT_BYTES = BLOCK_SCALES ? 0 : CHANNEL_VECTORS * HEAD_DIM * 4;
/// Runs whose scales are in shared memory: the one whose units O has, and those whose first group
/// has a stage.
constexpr int UNIT_SLOTS = 1 + (STAGES + GROUPS_A_RUN - 1) / GROUPS_A_RUN;

struct SharedLayout {
  static constexpr int QUERIES = 0;
  static constexpr int KEYS = QUERIES + BLOCK_Q * HEAD_DIM;
  static constexpr int KEYS_BYTES = GROUP_KV * HEAD_DIM;
  static constexpr int VALUES = KEYS + STAGES * KEYS_BYTES;
  static constexpr int VALUES_BYTES = HEAD_DIM * GROUP_KV;
  static constexpr int KEY_SCALES = VALUES + STAGES * VALUES_BYTES;
  static constexpr int KEY_SCALES_BYTES = 128 / KEYS_A_SCALE * 4;
  static constexpr int UNITS = KEY_SCALES + STAGES * KEY_SCALES_BYTES; ///< of channels
  static constexpr int RATIOS = UNITS + UNIT_SLOTS * UNIT_BYTES;       ///< of units, for each warp
  static constexpr int MAGICS = RATIOS + (BLOCK_SCALES ? 0 : BLOCK_Q / 16 * HEAD_DIM * 4);
  static constexpr int BARRIERS = MAGICS + MagicProduct::BYTES;
  static constexpr int QUERIES_CAME = BARRIERS + Ring<BLOCK_Q / 16>::BYTES;
  static constexpr int TOTAL = QUERIES_CAME + 8;
};
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");

using KeyRing = Ring<BLOCK_Q / 16>;

using Tiles = KeyTiles<GROUP_KV, GROUPS_A_RUN>;

__device__ __forceinline__ u32 unit_place(u32 shared, int slot, int vector) {
  return shared + SharedLayout::UNITS + slot * UNIT_BYTES + vector * HEAD_DIM * 4;
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const KeyRing ring = {shared + SharedLayout::BARRIERS};
  const u32 came = shared + SharedLayout::QUERIES_CAME;
  const int queries = minimum(BLOCK_Q, at.padded_q() - first_query);
  arrive_expecting(came, queries * HEAD_DIM);
  bulk_copy(shared + SharedLayout::QUERIES, p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
            queries * HEAD_DIM, came);

  const s8* keys = p.k8 + at.padded_key() * HEAD_DIM;
  const s8* values = p.vt8 + at.padded_key() * HEAD_DIM;
  const float* key_scales = p.k8_scale + at.padded_key() / KEYS_A_SCALE;
#pragma unroll 1
  for (Tiles tile(at, tokens_from(first_query, BLOCK_Q)); tile.more(); tile = tile.next()) {
    const RingPlace place(tile.count());
    const u32 full = ring.full(place);
    const bool has_unit = !BLOCK_SCALES && tile.begins_run();
    ring.begin_filling(place, SharedLayout::KEYS_BYTES + SharedLayout::VALUES_BYTES +
                                  SharedLayout::KEY_SCALES_BYTES + (has_unit ? UNIT_BYTES : 0));
    bulk_copy(shared + SharedLayout::KEYS + place.stage * SharedLayout::KEYS_BYTES,
              keys + static_cast<s64>(tile.number) * SharedLayout::KEYS_BYTES,
              SharedLayout::KEYS_BYTES, full);
    bulk_copy(shared + SharedLayout::KEY_SCALES + place.stage * SharedLayout::KEY_SCALES_BYTES,
              key_scales + tile.first_key() / 128 * (128 / KEYS_A_SCALE),
              SharedLayout::KEY_SCALES_BYTES, full);
    // The run that had this slot is over: this stage was released after the run behind it had
    // begun.
    if (has_unit)
      bulk_copy(unit_place(shared, tile.slot<UNIT_SLOTS>(), 0),
                channel_scales_of(p, at, tile.run()), UNIT_BYTES, full);
    bulk_copy(shared + SharedLayout::VALUES + place.stage * SharedLayout::VALUES_BYTES,
              values + static_cast<s64>(tile.number) * SharedLayout::VALUES_BYTES,
              SharedLayout::VALUES_BYTES, full);
  }
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const int lane = lane_id();
  const KeyRing ring = {shared + SharedLayout::BARRIERS};

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
  const int warpgroup = HEAD_DIM == 64 ? warp_id() / 4 : common_to_warp(warp_id() / 4);
  const Rows queries = {operand(SharedLayout::QUERIES, warpgroup, 64 * SCORE_ROW_BYTES)};
  wait_for_phase(shared + SharedLayout::QUERIES_CAME, 0);

  // What follows from the block's and the warpgroup's place is computed where it is needed:
  // registers are short.
  const auto own = [] {
    return tokens_from(block_of_queries_anew() * BLOCK_Q + read_thread_anew() / 128 * 64, 64);
  };
  const auto of_block = [] { return tokens_from(block_of_queries_anew() * BLOCK_Q, BLOCK_Q); };
  ConsumedKeyTiles<GROUP_KV, GROUPS_A_RUN, decltype(of_block), decltype(own)> walk(at, of_block,
                                                                                   own);
  const MagicProduct start(shared + SharedLayout::MAGICS);
  const Turns<WARPGROUPS, 1> turns;
  const auto take_group = [&](const auto& hidden) {
    float unit = 1;
    if constexpr (BLOCK_SCALES)
      unit = __ldg(channel_scales_of(p, at, walk.number()));
    const RingPlace place(walk.count());
    ring.wait_until_full(place);
    float key_scale[KEY_SCALES];
    read_key_scales(
        key_scale, shared + SharedLayout::KEY_SCALES + place.stage * SharedLayout::KEY_SCALES_BYTES,
        GROUP_KV == 128 ? 0 : walk.number()); // its parity counts if a group has 64 keys

    Scores::Sum sums[COLUMNS8][4];
    turns.take();
    issue_scores<KEY_TILES>(
        sums, queries, operand(SharedLayout::KEYS, place.stage, SharedLayout::KEYS_BYTES), start);
    finish<0>(sums);
    turns.pass();
    float largest[2], beta[2];
    rows.take_maxima(largest, beta, o, sums, key_scale, hidden);
    u32 p8[KEY_SCALES][4];
    rows.take_scores(p8, sums, key_scale, largest, beta, hidden);

    constexpr int PARTS = HEAD_DIM / PRODUCT_CHANNELS;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      TokenProducts<false, GROUP_KV / 32> p_v;
      p_v.issue(p8, operand(SharedLayout::VALUES, place.stage, SharedLayout::VALUES_BYTES), part);
      p_v.finish();
      if (part == PARTS - 1)
        ring.release(place);
      p_v.add_finished_to(o, beta[0] * unit, beta[1] * unit, part);
    }
    walk.advance();
  };

  turns.begin();
  for (;;) {
    const Tiles tile = walk.tile();
    if (!tile.more())
      break;
    const Range unmasked = walk.unmasked();
    if (tile.changes_run()) {
      if constexpr (BLOCK_SCALES) {
        o.settle();
      } else {
        ring.wait_until_full(RingPlace(walk.count())); // the run's scales come with the group
        o.change_units_of_warp(shared + SharedLayout::RATIOS +
                                   read_thread_anew() / 32 * (HEAD_DIM * 4),
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
  store(p, rows, o);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  if (!enter_queries<BLOCK_Q>(p, store_without_keys))
    return;
  const QueryHead at = query_head(p);
  const int first_query = block_of_queries() * BLOCK_Q;

  run_roles<BLOCK_Q / 16>(
      [&] {
        KeyRing{shared + SharedLayout::BARRIERS}.init();
        init_mbarrier(shared + SharedLayout::QUERIES_CAME, 1);
      },
      [&] {
        MagicProduct::write(shared + SharedLayout::MAGICS);
        fence_async_proxy();
      },
      [&] { produce(p, shared, at, first_query); }, [&] { consume(p, shared, at, first_query); });
}
