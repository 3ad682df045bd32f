//===- kernels/backward_dkv.cuh - dK and dV -------------------------------------===//
//
// SageBwd, Algorithm 2, the half that sums over queries. One block takes BLOCK_KV keys of one
// key/value head, 16 a warp, and walks over the queries of every head of its group, 64 at a time.
// All products are transposed, so that P^T and dS^T are A operands as they leave the accumulators:
//   P^T  = exp(S^T - lse)    S^T = K Q^T
//   dV  += P^T dO            unsigned x signed INT8, or 16 bits (DV16)
//   dP^T = V dO^T - delta    16-bit
//   dK  += dS^T Q            INT8, or 16 bits (DK16)
// Scales of P and dS: exact maxima a key and 64 queries (`row`), or those of the whole block that
// backward_dq has found (`block`). Sums of INT8 products are in units of their copy's channels,
// which change every CHANNEL_TOKENS_Q queries and from head to head. Their order is fixed.
//
// STAGES = 1: the two halves of a stage (rows for S and dP, the rest) are refilled in turn.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/block_maxima.cuh"
#include "tile/fused_dq.cuh"
#include "tile/key_gradients.cuh"
#include "tile/mean_gradients.cuh"
#include "tile/mean_scores.cuh"
#include "tile/quantizer.cuh"
#include "tile/tiles.cuh"
#include "tile/transposed_scores.cuh"

static_assert(BLOCK_SCALES || GROUP_Q == TILE_Q, "a group's maximum is taken over one tile");

/// Whether the template says what is held in registers: the address of transposed tiles, not the
/// next tile of the walk. With mma.sync ptxas chooses worse, but not beside 16-bit scores.
constexpr bool CHOOSES_REGISTERS = !ASYNCHRONOUS && !QK16;
/// dP is formed in so many parts, one after the other: mma.sync's registers are few.
constexpr int VALUE_PARTS = ASYNCHRONOUS ? 1 : SUM_CHANNELS / 64;

/// S and dP of the next tile are started before this one's work ends.
constexpr bool PIPELINED = ASYNCHRONOUS && STAGES == 2;
/// Runs whose units' scales are in shared memory: what sums were in, are in, and go to next.
constexpr int UNIT_SLOTS = 3;

struct SharedLayout {
  static constexpr int KEYS = 0;
  static constexpr int VALUES = KEYS + BLOCK_KV * SCORE_ROW_BYTES;
  static constexpr int DQ = VALUES + BLOCK_KV * VALUE_ROW_BYTES;
  static constexpr int FIRST_STAGE = DQ + FusedDq::BYTES;
  // Of a stage, from its start:
  static constexpr int QUERIES = 0;
  static constexpr int DOUT = QUERIES + TILE_Q * SCORE_ROW_BYTES;
  /// Q for dK: transposed, or rows of 16 bits.
  static constexpr int DK_QUERIES = DOUT + TILE_Q * VALUE_ROW_BYTES;
  /// dO for dV, transposed; in 16 bits the rows for dP serve.
  static constexpr int DV_DOUT = DK_QUERIES + TILE_Q * (DK16 ? SUM_ROW_BYTES : SUM_CHANNELS);
  static constexpr int ROWS = DV_DOUT + TILE_Q * (DV16 ? 0 : SUM_CHANNELS); ///< vectors per query
  static constexpr int ROWS_BYTES = (ROW_MINUS_DELTA + 1) * TILE_Q * 4;
  static constexpr int STAGE_BYTES = ROWS + ROW_VECTORS * TILE_Q * 4;
  static constexpr int UNITS = FIRST_STAGE + STAGES * STAGE_BYTES;
  static constexpr int TOTAL = UNITS + UNIT_SLOTS * UNIT_BYTES;
};
static_assert(SharedLayout::STAGE_BYTES % 1024 == 0, "tiles lie at multiples of their swizzle");
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");

__device__ __forceinline__ u32 units_of(u32 shared, int slot) {
  return shared + SharedLayout::UNITS + slot * UNIT_BYTES;
}
__device__ __forceinline__ int slot_behind(int slot) {
  return slot + 1 < UNIT_SLOTS ? slot + 1 : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  begin_in_stream_order();
  const int row_in_warp = lane_id() >> 2;
  if (!enter_keys<BLOCK_KV>(p))
    return;
  const KeyHead at = key_head(p);
  const int first_key = block_of_keys() * BLOCK_KV;
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  const auto query_rows = [&](const QueryTile& tile) {
    return p.q + at.first_query(p.q_stride_b, p.q_stride_s) + tile.head * p.q_stride_h +
           tile.first_query() * p.q_stride_s;
  };
  const auto load_rows = [&](const QueryTile& tile, u32 stage) {
    if (walk.has(tile)) {
      const int valid = at.seq_q() - tile.first_query();
      load_score_rows<TILE_Q>(stage + SharedLayout::QUERIES, p.q8 + tile.elements(),
                              query_rows(tile), p.q_stride_s, valid, p.channels);
      load_floats<SharedLayout::ROWS_BYTES / 4, THREADS>(stage + SharedLayout::ROWS,
                                                         p.q_rows + tile.rows());
      load_dout_rows<TILE_Q>(stage + SharedLayout::DOUT, p.dout_rows + tile.elements(),
                             p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                                 tile.head * p.dout_stride_h +
                                 tile.first_query() * p.dout_stride_s,
                             p.dout_stride_s, valid, p.value_channels);
    }
    cp_async_commit();
  };
  const auto load_for_gradients = [&](const QueryTile& tile, u32 stage) {
    if (walk.has(tile)) {
      const u32 of_dk = stage + SharedLayout::DK_QUERIES;
      const u64 transposed = tile.elements() + first_channel() * TILE_Q;
      if constexpr (DK16)
        load_tile<TILE_Q, SUM_ROW_BYTES, THREADS>(of_dk, query_rows(tile) + first_channel(),
                                                  p.q_stride_s * 2,
                                                  at.seq_q() - tile.first_query(), p.channels);
      else
        load_image<TILE_Q * SUM_CHANNELS>(of_dk, p.qt8 + transposed);
      if constexpr (!DV16)
        load_image<TILE_Q * SUM_CHANNELS>(stage + SharedLayout::DV_DOUT, p.dot8 + transposed);
    }
    cp_async_commit();
  };

  // Scales of the units of the run that `tile` is in.
  const auto load_units = [&](const QueryTile& tile, int slot) {
    if constexpr (CHANNEL_UNITS) {
      constexpr int VECTORS = CHANNEL_PARTS == 1 ? CHANNEL_VECTORS : 1; // that lie together
      constexpr int FLOATS = VECTORS * SUM_CHANNELS;
      const u32 units = units_of(shared, slot);
      const s64 unit = (at.first_unit<CHANNEL_TOKENS_Q>(tile.head) + tile.run()) *
                           (CHANNEL_VECTORS * HEAD_DIM) +
                       first_channel();
#pragma unroll
      for (int vector = 0; vector < CHANNEL_VECTORS; vector += VECTORS) {
        const u32 to = units + vector * VECTOR_BYTES;
        const s64 from = unit + vector * HEAD_DIM;
        if constexpr (!DK16)
          load_floats_if<FLOATS, THREADS>(to + UNITS_OF_Q, p.qt8_scale + from, walk.has(tile));
        if constexpr (!DV16)
          load_floats_if<FLOATS, THREADS>(to + UNITS_OF_DOUT, p.dot8_scale + from, walk.has(tile));
      }
    }
  };

  // K and V stay for the whole walk.
  load_score_rows<BLOCK_KV>(shared + SharedLayout::KEYS,
                            p.k8 + (at.padded_key() + first_key) * HEAD_DIM,
                            p.k + at.first_key(p.k_stride_b, p.k_stride_s) +
                                at.kv_head * p.k_stride_h + first_key * p.k_stride_s,
                            p.k_stride_s, at.seq_kv() - first_key, p.channels);
  load_tile<BLOCK_KV, VALUE_ROW_BYTES, THREADS>(
      shared + SharedLayout::VALUES,
      p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h +
          first_key * p.v_stride_s,
      p.v_stride_s * 2, at.seq_kv() - first_key, p.value_channels);
  FusedDq dq(shared + SharedLayout::DQ);
  dq.load(p, at, first_key);
  QueryTile tile = walk.start(at);
  u32 stage = shared + SharedLayout::FIRST_STAGE;
  u32 next_stage = stage + (STAGES - 1) * SharedLayout::STAGE_BYTES;
  int slot = 0; // of the units that sums are in
  load_units(tile, slot);
  load_units(walk.next_run(tile), slot + 1);
  load_rows(tile, stage);
  if constexpr (STAGES == 2)
    load_for_gradients(tile, stage);
  if constexpr (PIPELINED)
    load_rows(walk.next(tile), next_stage);

  const int warp_key = first_key + warp_id() * 16;
  const int key[2] = {warp_key + row_in_warp, warp_key + row_in_warp + 8};
  // One scale serves both rows (KEYS_A_SCALE).
  const float key_scale =
      QK16 ? p.softmax_scale * LOG2_E
           : p.k8_scale[at.padded_key() / KEYS_A_SCALE + key_scale_place(key[0])];

  const u32 lane_of_tokens = CHOOSES_REGISTERS ? anew(token_lane()) : token_lane();
  ScoreRows keys;
  ValueRows values;
  Sums dk, dv;
  MeanGradients of_mean;
  Block blocks[2]; // in which products take turns
  Scores::Sum own_scores[COLUMNS8][4];
  float own_values[COLUMNS8][4];
  auto& scores = score_sums(blocks[PRODUCTS % 2], own_scores);
  auto& value_products = value_sums(blocks[(PRODUCTS + 1) % 2], own_values);

  // Descriptors of the steps along K and V would occupy registers over the whole loop.
  const auto afresh = [](auto rows) {
    if constexpr (ASYNCHRONOUS)
      asm volatile("" : "+r"(rows.tile));
    return rows;
  };
  const auto start_scores = [&](u32 stage) {
    issue_scores(scores, afresh(keys), stage + SharedLayout::QUERIES);
  };
  const auto minus_delta_of = [&](u32 stage, int j) {
    const u32 columns = stage + SharedLayout::ROWS + ROW_MINUS_DELTA * TILE_Q * 4 + j / 2 * 64 +
                        j % 2 * 8 + (lane_id() & 3) * 16;
    if constexpr (ASYNCHRONOUS) {
      const float2 x = read_float2(columns);
      return Quad{x.x, x.y, x.x, x.y};
    }
    // Of mma.sync's accumulators, which are neighbours, none is copied so.
    const float2 low = read_float2_again(columns), high = read_float2_again(columns);
    return Quad{low.x, low.y, high.x, high.y};
  };

  const auto start_values = [&](u32 stage) {
    issue_values(value_products, afresh(values), stage + SharedLayout::DOUT,
                 [&](int j) { return minus_delta_of(stage, j); });
  };

  // Asked for where it is needed: held from a tile's start, the next one takes registers.
  const auto next_tile = [&] {
    return walk.next({tile.head, CHOOSES_REGISTERS ? anew(tile.in_head) : tile.in_head, tile.flat});
  };
  const auto work_on_tile = [&] {
    const int first_query = tile.first_query();
    const u32 rows = stage + SharedLayout::ROWS, dout = stage + SharedLayout::DOUT;
    const auto minus_delta = [&](int j) { return minus_delta_of(stage, j); };

    if constexpr (!PIPELINED) {
      wait_for_tiles();
      if constexpr (STAGES == 2)
        load_rows(next_tile(), next_stage);
      load_for_gradients(STAGES == 2 ? next_tile() : tile, next_stage);
      start_scores(stage);
      if constexpr (VALUE_PARTS == 1)
        start_values(stage);
    }
    finish<PIPELINED ? 0 : 1>(scores);
    float x[COLUMNS8][4];
    probabilities(x, scores, rows, key_scale, mean_scores_of(at, tile, key));
    // Queries past the end have a ROW_SHIFT of infinity, and rows of keys past it are not stored;
    // but dQ sums over keys, and key 0 is not among them where it is apart.
    const bool has_key_apart = WITH_DQ && warp_key < SINK_KEYS;
    if ((HAS_MASK || WITH_DQ) &&
        (needs_mask(at, tokens_from(first_query, TILE_Q), tokens_from(warp_key, 16)) ||
         has_key_apart))
      mask(
          x,
          [&](int r, int column) {
            return hidden(at, first_query + column, key[r]) || (WITH_DQ && key[r] < SINK_KEYS);
          },
          0.0f);

    const BlockMaxima of_block(p, at, tile, warp_key);
    float largest_p[2] = {of_block.p, of_block.p}, largest_ds[2] = {of_block.ds, of_block.ds};
    u32 p8[TILE_Q / 32][4], ds8[TILE_Q / 32][4], p16[TILE_Q / 16][4], ds16[TILE_Q / 16][4];
    Scale p_low, p_high, ds_low, ds_high;
    if constexpr (DV16) {
      pack_fragments<TILE_Q / 16>(p16, x);
      issue_rows<TILE_Q / 16>(dv, p16, dout + first_channel() * (TILE_Q * 2));
    } else {
      if constexpr (!BLOCK_SCALES) {
        largest_probabilities(x, largest_p);
        quad_max_nan(largest_p);
      }
      p_low = fast_scale<UNSIGNED_LEVELS>(largest_p[0]);
      p_high = fast_scale<UNSIGNED_LEVELS>(largest_p[1]);
      quantize_fragments<false, TILE_Q / 32>(p8, x, p_low.inverse, p_high.inverse);
    }
    float ds[COLUMNS8][4]; // dP - delta at first
    if constexpr (VALUE_PARTS == 1) {
      take_values<DV16 ? 1 : 0>(ds, value_products, minus_delta);
      score_gradients<!BLOCK_SCALES && !DK16>(ds, x, largest_ds);
    } else {
      constexpr int PART = COLUMNS8 / VALUE_PARTS;
#pragma unroll
      for (int part = 0; part < VALUE_PARTS; ++part) {
        float(&of_part)[PART][4] = *reinterpret_cast<float(*)[PART][4]>(ds[part * PART]);
        const float(&p_of_part)[PART][4] =
            *reinterpret_cast<const float(*)[PART][4]>(x[part * PART]);
        issue_values<8 * PART>(of_part, values, dout + row_offset<VALUE_ROW_BYTES>(8 * PART * part),
                               [&](int j) { return minus_delta(part * PART + j); });
        score_gradients<!BLOCK_SCALES && !DK16>(of_part, p_of_part, largest_ds);
      }
    }
    of_mean.take(ds);
    dq.raise_scales(ds);
    if constexpr (DK16) {
      pack_fragments<TILE_Q / 16>(ds16, ds);
    } else {
      if constexpr (!BLOCK_SCALES)
        quad_max_nan(largest_ds);
      ds_low = fast_scale<SIGNED_LEVELS>(largest_ds[0]);
      ds_high = fast_scale<SIGNED_LEVELS>(largest_ds[1]);
      quantize_fragments<true, TILE_Q / 32>(ds8, ds, ds_low.inverse, ds_high.inverse);
    }
    dq.write(ds, ds16);
    if constexpr (WITH_DQ && STAGES == 2)
      __syncthreads(); // else the wait for what dK reads has one

    // What S and dP were read from is free.
    if constexpr (PIPELINED || STAGES == 1) {
      if constexpr (DV16)
        finish_rows<0>(dv);
      wait_for_tiles();
      load_rows(PIPELINED ? walk.next(next_tile()) : next_tile(), stage);
      if constexpr (PIPELINED)
        load_for_gradients(next_tile(), next_stage);
    }
    const u32 q_tile = stage + SharedLayout::DK_QUERIES;
    const u32 dout_tile = stage + SharedLayout::DV_DOUT;
    const float p_unit[2] = {p_low.value * of_block.unit_dout, p_high.value * of_block.unit_dout};
    const float ds_unit[2] = {ds_low.value * of_block.unit_q, ds_high.value * of_block.unit_q};
    if constexpr (DK16)
      issue_rows<TILE_Q / 16>(dk, ds16, q_tile);
    // Two of these are under way at a time: dV, dK, and if pipelined the next tile's S and dP.
    const auto issue = [&](int i) {
      if (i < PRODUCTS_OF_DV)
        blocks[i % 2].template issue<false>(p8, dout_tile + lane_of_tokens, i);
      else if (i < PRODUCTS)
        blocks[i % 2].template issue<true>(ds8, q_tile + lane_of_tokens, i - PRODUCTS_OF_DV);
      else if (PIPELINED && i == PRODUCTS)
        start_scores(next_stage);
      else if (PIPELINED)
        start_values(next_stage);
    };
    issue(0);
    if constexpr (DK16 && PIPELINED)
      finish_rows<1>(dk);
    issue(1);
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      if (i < PRODUCTS_OF_DV && (PIPELINED || i + 1 < PRODUCTS))
        blocks[i % 2].template add_to<false, 1>(dv, p_unit[0], p_unit[1], i);
      else if (i < PRODUCTS_OF_DV)
        blocks[i % 2].template add_to<false, 0>(dv, p_unit[0], p_unit[1], i);
      else if (PIPELINED || i + 1 < PRODUCTS)
        blocks[i % 2].template add_to<true, 1>(dk, ds_unit[0], ds_unit[1], i - PRODUCTS_OF_DV);
      else
        blocks[i % 2].template add_to<true, 0>(dk, ds_unit[0], ds_unit[1], i - PRODUCTS_OF_DV);
      issue(i + 2);
    }
    if constexpr (DK16 && !PIPELINED)
      finish_rows<0>(dk);
    dq.add_to(p.dq_sum + tile.elements());
    tile = next_tile();
    const u32 last_stage = stage;
    stage = next_stage;
    next_stage = last_stage;
  };

  if (walk.any()) {
    wait_for_tiles();
    keys.load(shared + SharedLayout::KEYS, warp_id() * 16);
    values.load(shared + SharedLayout::VALUES, warp_id() * 16);
    if constexpr (PIPELINED) {
      start_scores(stage);
      start_values(stage);
    }
    for (;;) {
      const float* mean = MeanGradients::mean_of(at, tile);
      do {
        work_on_tile();
      } while (!walk.begins_run(tile));
      of_mean.add_to(dk, mean, units_of(shared, slot));
      if constexpr (PIPELINED) {
        finish<0>(scores);
        finish<0>(value_products);
      }
      if (!walk.has(tile))
        break;
      if constexpr (CHANNEL_UNITS) {
        // The scales came during the run that ends; in the slot of the run before it none are read.
        const u32 last = units_of(shared, slot);
        slot = slot_behind(slot);
        const u32 units = units_of(shared, slot);
        change_units(dk, dv, last, units);
        load_units(walk.next_run(tile), slot_behind(slot));
        if constexpr (STAGES == 2)
          cp_async_commit(); // else they came behind a run of one tile
      } else {
        dk.settle();
        dv.settle();
      }
    }
  }
  cp_async_wait<0>();

  if constexpr (CHANNEL_UNITS) {
    if (walk.any()) { // else there are no units
      const u32 units = units_of(shared, slot);
      leave_units(dk, dv, units);
    }
  } else {
    dk.settle();
    dv.settle();
  }
  const KeyGradients stored = store_key_gradients(p, at, warp_key, dk, dv);
  if constexpr (SINK_KEYS > 0) {
    if (first_key == 0) {
      __syncthreads();
      write_first_key<THREADS>(at, stored);
    }
  }
}
