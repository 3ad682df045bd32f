//===- kernels/backward_dkv_ws.cuh - dK and dV, warp-specialised, sm_90a ---------===//
//
// This kernel computes what kernels/backward_dkv.cuh computes, by warps of different duties. One
// thread copies tiles of queries into a ring of stages, and a warp beside it writes what dP of each
// tile starts from; each warpgroup owns 64 keys and walks over the tiles. Two blocks of
// accumulators alternate: while one product is added to its sums the next one runs, and S of the
// next tile is under way before the work on this tile ends.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_dkv_ws.cuh"
#include "tile/math/column_start.cuh"
#include "tile/math/key_gradients.cuh"
#include "tile/math/operand.cuh"
#include "tile/memory/caller_rows.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/roles.cuh"
#include "tile/walk/tile_messages.cuh"
#include "tile/walk/tiles.cuh"

static_assert(!QK16 && !BLOCK_SCALES && GROUP_Q == TILE_Q);

constexpr int CONSUMING_WARPS = BLOCK_KV / 16;

/// When dP begins: with the next tile's S, or beside this tile's P. The latter hides it but begins
/// P later. Measured on an H200: at 64 channels, where three warpgroups share the SM's units, it is
/// 3 % faster, at 128 2 % slower. Three warpgroups that hold P in 16 bits for dV have no registers
/// for dP before dV's product is over.
enum class DpBegins { with_next_scores, beside_p, behind_dv };
constexpr DpBegins DP_BEGINS = HEAD_DIM == 128          ? DpBegins::with_next_scores
                               : DV16 && BLOCK_KV > 128 ? DpBegins::behind_dv
                                                        : DpBegins::beside_p;
constexpr int FIRST_KEY_BARRIER = 1;

constexpr BackwardDkvWsLayout LAYOUT(SHAPE);
constexpr int SCALE_BUFFERS = LAYOUT.scale_buffers;

using QueryRing = Ring<CONSUMING_WARPS>;

__device__ __forceinline__ u32 stage_of(u32 shared, const RingState& state) {
  return shared + LAYOUT.first_stage + state.stage * LAYOUT.stage_bytes;
}
__device__ __forceinline__ u32 scale_buffer(u32 shared, int run) {
  return shared + LAYOUT.channel_scales + run * CHANNEL_SCALES_BYTES;
}

__device__ __forceinline__ u32 started(u32 shared, const RingState& state) {
  return shared + LAYOUT.started + state.stage * 8;
}
/// The address of a tile's message.
struct MessageAddress {
  u32 shared;
  __device__ __forceinline__ u32 operator()(int count) const {
    return shared + LAYOUT.messages + RingState(count).stage * LAYOUT.message_bytes;
  }
};
using Walk = ConsumedQueryRuns<SCALE_BUFFERS, MessageAddress>;

// Each duty reads its head again: what all have in common takes registers, or memory, until the
// last of them needs it.

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, int first_key) {
  const KeyHead at = reread_key_head(p);
  const QueryRing ring = {shared + LAYOUT.barriers};
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  const u32 came = shared + LAYOUT.keys_came;
  const int keys = minimum(BLOCK_KV, at.padded_kv() - first_key);
  const int values = PACKED ? keys : BLOCK_KV; // behind all of a tensor's there come zeros
  arrive_expecting(came, keys * HEAD_DIM + values * VALUE_ROW_BYTES);
  bulk_copy(shared + LAYOUT.keys, p.k8 + (at.padded_key() + first_key) * HEAD_DIM, keys * HEAD_DIM,
            came);
#pragma unroll
  for (int tile = 0; tile < BLOCK_KV; tile += TILE_ROWS)
    if (tile < values)
      copy_caller_rows(shared + LAYOUT.values + tile * VALUE_ROW_BYTES, p.v_map,
                       p.v_rows + (at.padded_key() + first_key + tile) * HEAD_DIM, first_key + tile,
                       at.kv_head, at.batch, came);

  int count = 0, buffer = 0;
#pragma unroll 1
  for (QueryTile tile = walk.start(at); walk.has(tile); tile = walk.next(tile), ++count) {
    const RingState state(count);
    const u32 stage = stage_of(shared, state), full = ring.full(state);
    const bool begins_scale_block = DKV_HAS_CHANNEL_SCALES && walk.begins_run(tile);
    constexpr int SCALE_VECTORS = (DK16 ? 0 : CHANNEL_VECTORS) + (DV16 ? 0 : CHANNEL_VECTORS);
    ring.begin_filling(state,
                       LAYOUT.starts + (begins_scale_block ? SCALE_VECTORS * VECTOR_BYTES : 0),
                       MessageAddress{shared}(count),
                       TileMessage(tile.in_head, walk.begins_run(tile), buffer,
                                   hides_part(at, tile.head, tile.first_query(), first_key))
                           .bits);
    bulk_copy(stage + LAYOUT.queries, p.q8 + tile.elements(), TILE_Q * HEAD_DIM, full);
    bulk_copy(stage + LAYOUT.rows, p.q_rows + tile.rows(), LAYOUT.rows_bytes, full);
    if constexpr (SCALED_DOUT)
      bulk_copy(stage + LAYOUT.dout, p.dout_rows + tile.elements(), TILE_Q * VALUE_ROW_BYTES, full);
    else
      copy_caller_rows(stage + LAYOUT.dout, p.dout_map, p.dout_rows + tile.elements(),
                       tile.first_query(), tile.head, at.batch, full);
    if (begins_scale_block) {
      const u32 channel_scales = scale_buffer(shared, buffer);
      buffer = buffer + 1 < SCALE_BUFFERS ? buffer + 1 : 0;
      constexpr int BYTES = CHANNEL_VECTORS * VECTOR_BYTES;
      const s64 scale_block = (at.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.run()) *
                              (CHANNEL_VECTORS * HEAD_DIM);
      if constexpr (!DK16)
        bulk_copy(channel_scales + SCALES_OF_Q, p.qt8_scale + scale_block, BYTES, full);
      if constexpr (!DV16)
        bulk_copy(channel_scales + SCALES_OF_DOUT, p.dot8_scale + scale_block, BYTES, full);
    }
    if constexpr (!DV16)
      bulk_copy(stage + LAYOUT.dv_dout, p.dot8 + tile.elements(), TILE_Q * HEAD_DIM, full);
    if constexpr (DK16)
      copy_caller_rows(stage + LAYOUT.dk_queries, p.q_map, p.query_rows + tile.elements(),
                       tile.first_query(), tile.head, at.batch, full);
    else
      bulk_copy(stage + LAYOUT.dk_queries, p.qt8 + tile.elements(), TILE_Q * HEAD_DIM, full);
  }
  // Behind the last tile consumers start the products of one more, whose results nobody reads.
  ring.begin_filling(RingState(count), 0, MessageAddress{shared}(count),
                     TileMessage::end(buffer).bits);
}

/// A warp beside it writes what dP of each tile starts from, and says for consumers that the stage
/// is full: also that behind the last tile.
__device__ __forceinline__ void write_starts(const Params& p, u32 shared, int first_key) {
  const KeyHead at = reread_key_head(p);
  const int tiles = Walk::tiles(at, tokens_from(first_key, BLOCK_KV));
  const QueryRing ring = {shared + LAYOUT.barriers};
#pragma unroll 1
  for (int count = 0; HAS_LISTS || count <= tiles; ++count) {
    const RingState state(count);
    const u32 stage = stage_of(shared, state);
    ring.wait_until_full(state);
    const bool ends = HAS_LISTS && TileMessage(MessageAddress{shared}(count)).ends();
    ColumnStart::write(stage + LAYOUT.starts, stage + LAYOUT.rows + ROW_MINUS_DELTA * TILE_Q * 4);
    arrive(started(shared, state));
    if (ends)
      break;
  }
}

/// The first key that the warp owns. Computed where it is needed: registers are short. To read from
/// memory which keys the block has takes more of them than to keep it.
__device__ __forceinline__ int warp_key(const Params& p, int first_key) {
  return (HAS_LISTS ? first_key : reread_block_of_keys(p) * BLOCK_KV) + reread_thread() / 32 * 16;
}

/// S and dP of a tile, from the stage where it is.
struct Products {
  struct Rows {
    TilesDescriptor tile;
  };
  u32 shared;
  Rows keys, values;
  Scores::Sum (&scores)[COLUMNS8][4];
  ValueSum (&value_products)[COLUMNS8][4];

  __device__ __forceinline__ void start_scores(const RingState& state) const {
    wait_for_phase(started(shared, state), state.parity, "what dP starts from");
    issue_scores(scores, keys, operand(LAYOUT.queries, state));
  }
  __device__ __forceinline__ void start_values(const RingState& state) const {
    issue_values(value_products, values, operand(LAYOUT.dout, state),
                 ColumnStart(shared + LAYOUT.ones), stage_of(shared, state) + LAYOUT.starts);
  }
  __device__ __forceinline__ TilesDescriptor operand(int of_stage, const RingState& state) const {
    return (TilesDescriptor(shared) + (LAYOUT.first_stage + of_stage))
        .at(state.stage, LAYOUT.stage_bytes);
  }
};

/// Processes each tile, as one warpgroup.
struct TileWork {
  const Params& p;
  const KeyHead& at;
  QueryRing ring;
  const Products& products;
  Walk& walk;
  Sums &dk, &dv;
  Block (&blocks)[2]; ///< in which products of dV and dK take turns
  float key_scale;
  int first_key;

  __device__ __forceinline__ void run() const {
    const RingState state(walk.count()), next_state(walk.count() + 1);
    finish<0>(products.scores);
    if constexpr (DP_BEGINS == DpBegins::beside_p)
      products.start_values(state);
    float x[COLUMNS8][4], slope[SLOPES][4], ds[COLUMNS8][4];
    recompute_p(x, slope, state);
    Operand of_p, of_ds;
    const RowScales p_scales = quantize_p(of_p, x, state);
    if constexpr (BENDS_SCORES)
      multiply(x, slope);
    const RowScales ds_scales = form_ds(of_ds, ds, x);
    // Products begin only after dS has been quantised, because both at a time take more registers
    // than there are.
    if constexpr (!DK16 && !DV16)
      order_behind(of_p.x8[0][0], of_ds.x8, p.padded_q & 1);
    if constexpr (DV16 && DP_BEGINS != DpBegins::behind_dv)
      finish_rows<0>(dv);
    add_products(of_p, of_ds, p_scales, ds_scales, state, next_state);
    walk.advance();
  }

private:
  __device__ __forceinline__ void recompute_p(float (&x)[COLUMNS8][4], float (&slope)[SLOPES][4],
                                              const RingState& state) const {
    const u32 rows = stage_of(products.shared, state) + LAYOUT.rows;
    if constexpr (HAS_SCORE) {
      const int key = warp_key(p, first_key) + lane_id() / 4;
      scored_probabilities(x, slope, products.scores, rows, key_scale,
                           {p, at.sequence(), walk.head(at)}, {key, key + 8}, walk.first_query());
    } else {
      probabilities(x, products.scores, rows, key_scale);
    }
    // Queries past the end have a ROW_SHIFT of infinity, which says nothing to a score function
    // that is not finite there, and rows of keys past it are not stored.
    if constexpr (HIDES_SCORES || HAS_SCORE) {
      const int first_query = walk.first_query(), own = warp_key(p, first_key);
      bool masked = needs_mask(at, tokens_from(first_query, TILE_Q), tokens_from(own, 16));
      if constexpr (HIDES_ANYWHERE)
        masked = masked || walk.hides_part();
      if (masked || ends_in_tile(at, first_query)) {
        const auto key_of = [&](int r) { return own + lane_id() / 4 + 8 * r; };
        const QueriesHiddenFrom hidden(at, walk.head(at), key_of, first_query);
        hide(x, slope, [&](int r, int column) {
          return hidden(r, column) || is_past_end(at, first_query + column);
        });
      }
    }
  }
  /// Forms P as dV's operand; in 16 bits dV's product is started.
  __device__ __forceinline__ RowScales quantize_p(Operand& of_p, const float (&x)[COLUMNS8][4],
                                                  const RingState& state) const {
    if constexpr (DV16) {
      pack_fragments<TILE_Q / 16>(of_p.x16, x);
      issue_rows<TILE_Q / 16>(dv, of_p.x16, products.operand(LAYOUT.dout, state));
      if constexpr (DP_BEGINS == DpBegins::behind_dv) {
        products.start_values(state);
        finish_rows<1>(dv);
      }
      return {};
    } else {
      float largest[2];
      largest_probabilities(x, largest);
      quad_max_nan(largest);
      return quantize<false>(of_p, x, largest);
    }
  }
  /// Forms dS once dP is there, as dK's operand.
  __device__ __forceinline__ RowScales form_ds(Operand& of_ds, float (&ds)[COLUMNS8][4],
                                               const float (&x)[COLUMNS8][4]) const {
    float largest[2] = {0, 0};
    finish_dp<DV16 && DP_BEGINS != DpBegins::behind_dv ? 1 : 0>(ds, products.value_products);
    score_gradients<!DK16>(ds, x, largest);
    if constexpr (DK16) {
      pack_fragments<TILE_Q / 16>(of_ds.x16, ds);
      return {};
    } else {
      quad_max_nan(largest);
      return quantize<true>(of_ds, ds, largest);
    }
  }
  /// Two products are under way at a time: dV, dK, and of the next tile S, or S and dP.
  __device__ __forceinline__ void add_products(const Operand& of_p, const Operand& of_ds,
                                               const RowScales& p_scales,
                                               const RowScales& ds_scales, const RingState& state,
                                               const RingState& next_state) const {
    if constexpr (DK16)
      issue_rows<TILE_Q / 16>(dk, of_ds.x16, products.operand(LAYOUT.dk_queries, state));
    const auto issue = [&](int i) {
      if (i < PRODUCTS_OF_DV)
        blocks[i % 2].template issue<false>(of_p.x8, products.operand(LAYOUT.dv_dout, state), i);
      else if (i < PRODUCTS)
        blocks[i % 2].template issue<true>(of_ds.x8, products.operand(LAYOUT.dk_queries, state),
                                           i - PRODUCTS_OF_DV);
      else if (i == PRODUCTS) {
        products.start_scores(next_state);
        walk.meet(walk.count() + 1);
      } else if constexpr (DP_BEGINS == DpBegins::with_next_scores)
        products.start_values(next_state);
    };
    issue(0);
    if constexpr (DK16)
      finish_rows<1>(dk);
    issue(1);
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      if (i < PRODUCTS_OF_DV)
        blocks[i % 2].template add_to<false, 1>(dv, p_scales.low.value, p_scales.high.value, i);
      else
        blocks[i % 2].template add_to<true, 1>(dk, ds_scales.low.value, ds_scales.high.value,
                                               i - PRODUCTS_OF_DV);
      if (i == PRODUCTS - 1)
        ring.release(state);
      issue(i + 2);
    }
    if constexpr (PRODUCTS == 0)
      ring.release(state);
  }
};

__device__ __forceinline__ void consume(const Params& p, u32 shared, int first_key) {
  const KeyHead at = reread_key_head(p);
  // One scale serves both rows (KEYS_A_SCALE). A block may be longer than what is padded; what its
  // last rows hold does not matter.
  const float key_scale =
      p.k8_scale[at.padded_key() / KEYS_A_SCALE +
                 key_scale_place(
                     minimum(first_key + warp_id() * 16 + lane_id() / 4, at.padded_kv() - 1))];
  const int warpgroup = common_to_warp(warp_id() / 4);
  const TilesDescriptor base(shared);

  Sums dk, dv;
  Block blocks[2];
  Scores::Sum no_scores[COLUMNS8][4];
  float no_values[COLUMNS8][4];
  const Products products = {shared,
                             {(base + LAYOUT.keys).at(warpgroup, 64 * SCORE_ROW_BYTES)},
                             {(base + LAYOUT.values).at(warpgroup, 64 * VALUE_ROW_BYTES)},
                             score_sums(blocks[PRODUCTS % 2], no_scores),
                             value_sums(blocks[(PRODUCTS + 1) % 2], no_values)};
  Walk walk(at, {shared});
  const TileWork work = {
      p, at, {shared + LAYOUT.barriers}, products, walk, dk, dv, blocks, key_scale, first_key};

  if constexpr (HAS_LISTS) {
    wait_for_phase(started(shared, RingState(0)), 0);
    walk.meet(0);
  }
  const bool any = walk.any(at);
  // Whether queries see the keys or not: no copy may come after the block's end.
  wait_for_phase(shared + LAYOUT.keys_came, 0);
  if (any) {
    products.start_scores(RingState(0));
    if constexpr (DP_BEGINS == DpBegins::with_next_scores)
      products.start_values(RingState(0));
    for (;;) {
      do {
        work.run();
      } while (walk.is_in_run());
      finish<0>(products.scores);
      if constexpr (DP_BEGINS == DpBegins::with_next_scores)
        finish<0>(products.value_products);
      if (!walk.next_run(reread_key_head(p)))
        break;
      if constexpr (DKV_HAS_CHANNEL_SCALES) {
        const u32 channel_scales = scale_buffer(shared, walk.buffer()),
                  last = scale_buffer(shared, walk.last_buffer());
        const u32 ratios = shared + LAYOUT.ratios + reread_thread() / 32 * VECTOR_BYTES;
        rescale_columns_of_warp(dk, dv, ratios, last, channel_scales);
      }
    }
    const u32 channel_scales = scale_buffer(shared, walk.last_buffer()); // what sums are in
    apply_channel_scales(dk, dv, channel_scales);
  }

  const KeyGradients stored =
      store_key_gradients(p, reread_key_head(p), warp_key(p, first_key), dk, dv);
  if constexpr (SINK_KEYS > 0) {
    if (first_key == 0 && warp_id() < 4) { // the warpgroup that has stored it
      named_barrier_sync<128>(FIRST_KEY_BARRIER);
      write_first_key<128>(reread_key_head(p), stored);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_keys<BLOCK_KV>(p))
    return;
  const int first_key = block_of_keys(p) * BLOCK_KV;

  run_roles<CONSUMING_WARPS>(
      [&] {
        QueryRing{shared + LAYOUT.barriers}.init();
        for (int stage = 0; stage < STAGES; ++stage)
          init_mbarrier(shared + LAYOUT.started + stage * 8, 32);
        init_mbarrier(shared + LAYOUT.keys_came, 1);
      },
      [&] {
        OnesRows::write(shared + LAYOUT.ones);
        fence_async_proxy();
      },
      [&] { produce(p, shared, first_key); }, [&] { consume(p, shared, first_key); },
      [&] {
        if (warp_id() == CONSUMING_WARPS + 1)
          write_starts(p, shared, first_key);
      });
}
