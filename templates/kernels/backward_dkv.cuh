//===- kernels/backward_dkv.cuh - dK and dV -------------------------------------===//
//
// SageBwd, Algorithm 2, the half that sums over queries. A block takes BLOCK_KV keys of one
// key/value head, 16 a warp, and walks over the queries of every head of its group, 64 at a time.
// All products are transposed, so that accumulators of P^T and dS^T are A operands as they are:
//   P^T  = exp(S^T - lse)    S^T = K Q^T
//   dV  += P^T dO            unsigned x signed INT8, or 16 bits (DV16)
//   dP^T = V dO^T - delta    16-bit; sums in FP32 or in FP16 (DP16)
//   dK  += dS^T Q            INT8, or 16 bits (DK16)
// P and dS are quantised by the exact maximum of a key over 64 queries (`row`), or by that of a
// group of queries and keys, which backward_dq has found (`block`). Sums of INT8 products have the
// units of their copy's channel scales, which change with each run of tiles. Sums have an order.
//
// If STAGES = 1, the two halves of a stage (rows for S and dP, and the rest) are loaded in turn. If
// STAGES = 0, parts of a tile take turns in the same memory, and warps wait for each of them: wide
// heads in 99 KB.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/dq/fused_dq.cuh"
#include "tile/math/block_maxima.cuh"
#include "tile/math/mean_gradients.cuh"
#include "tile/math/mean_scores.cuh"
#include "tile/math/operand.cuh"
#include "tile/memory/dkv_loads.cuh"

static_assert(BLOCK_SCALES || GROUP_Q == TILE_Q, "a group's maximum is taken over one tile");

/// Whether the template says what is held in registers: the address of transposed tiles, not the
/// next tile of the walk. With mma.sync ptxas chooses worse, but not beside 16-bit scores.
constexpr bool CHOOSES_REGISTERS = !ASYNCHRONOUS && !QK16;
constexpr int STEPS_OF_PART = VALUE_STEPS / DOUT_PARTS; ///< of dP, in a part of dO's channels
/// dP is formed in so many parts, one after the other: mma.sync's registers are few.
constexpr int VALUE_PARTS = ASYNCHRONOUS || DOUT_PARTS > 1 ? 1 : SUM_CHANNELS / 64;
constexpr bool STARTS_VALUES = VALUE_PARTS == 1 && DOUT_PARTS == 1 && !DP16; ///< before P

/// S and dP of the next tile are started before this one's work ends.
constexpr bool PIPELINED = ASYNCHRONOUS && STAGES == 2;
/// S and dP of a tile, from what is in a stage.
struct Products {
  const ScoreRows& keys;
  const ValueRows& values;
  Scores::Sum (&scores)[COLUMNS8][4];
  ValueSum (&value_products)[COLUMNS8][4];

  __device__ __forceinline__ void start_scores(u32 stage) const {
    issue_scores(scores, afresh(keys), stage + LAYOUT.queries);
  }
  __device__ __forceinline__ void start_values(u32 stage) const {
    issue_values(value_products, afresh(values), stage + LAYOUT.dout,
                 [&](int j) { return minus_delta(stage, j); });
  }
  /// Gives what columns 8j of dP start from.
  static __device__ __forceinline__ Quad minus_delta(u32 stage, int j) {
    const u32 columns = stage + LAYOUT.rows + ROW_MINUS_DELTA * TILE_Q * 4 + j / 2 * 64 +
                        j % 2 * 8 + (lane_id() & 3) * 16;
    if constexpr (ASYNCHRONOUS) {
      const float2 x = read_float2(columns);
      return Quad{x.x, x.y, x.x, x.y};
    }
    // So none of mma.sync's accumulators, which are neighbours, is copied.
    const float2 low = read_float2_again(columns), high = read_float2_again(columns);
    return Quad{low.x, low.y, high.x, high.y};
  }

private:
  /// Descriptors of the steps along K and V would occupy registers over the whole loop.
  template <typename Rows> static __device__ __forceinline__ Rows afresh(Rows rows) {
    if constexpr (ASYNCHRONOUS)
      asm volatile("" : "+r"(rows.tile));
    return rows;
  }
};

/// Processes each tile, as one warp.
struct TileWork {
  const Params& p;
  const KeyHead& at;
  const QueryTiles& walk;
  const Loads& load;
  const Products& products;
  const FusedDq& dq;
  Position& now;
  Sums &dk, &dv;
  MeanGradients& of_mean;
  Block (&blocks)[2]; ///< in which products of dV and dK take turns
  const int (&key)[2];
  int warp_key;
  float key_scale;
  u32 lane_of_tokens;

  __device__ __forceinline__ void run() const {
    const int first_query = now.tile.first_query();
    if constexpr (!PIPELINED)
      start();
    float x[COLUMNS8][4], slope[SLOPES][4];
    recompute_p(x, slope, first_query);
    const BlockMaxima of_block(p, at, now.tile, warp_key);
    Operand of_p, of_ds;
    const RowScales p_scales = quantize_p(of_p, x, of_block);
    if constexpr (BENDS_SCORES)
      multiply(x, slope);
    float ds[COLUMNS8][4]; // dP - delta at first
    const RowScales ds_scales = form_ds(of_ds, ds, x, of_block);
    dq.write(of_ds.x16);
    if constexpr (WITH_DQ && STAGES == 2)
      __syncthreads(); // else the wait for what dK reads has one
    refill();
    const float p_factor[2] = {p_scales.low.value * of_block.scale_dout,
                               p_scales.high.value * of_block.scale_dout};
    const float ds_factor[2] = {ds_scales.low.value * of_block.scale_q,
                                ds_scales.high.value * of_block.scale_q};
    add_products(of_p, of_ds, p_factor, ds_factor);
    dq.add_to(p.dq_sum + now.tile.elements());
    if constexpr (STAGES == 0) {
      __syncthreads(); // what dK and dV take has been read
      load.rows(next_tile(), now.stage);
    }
    advance();
  }

private:
  /// The next tile. Computed where it is needed: from a tile's start on it would take registers.
  __device__ __forceinline__ QueryTile next_tile() const {
    const QueryTile& tile = now.tile;
    if constexpr (HAS_LISTS)
      return now.next;
    return walk.next(
        {tile.head, CHOOSES_REGISTERS ? opaque(tile.in_head) : tile.in_head, tile.flat});
  }
  /// This is for tiles whose S and dP were not started with the tile before.
  __device__ __forceinline__ void start() const {
    wait_for_tiles();
    if constexpr (STAGES == 2)
      load.rows(next_tile(), now.next_stage);
    if constexpr (STAGES != 0)
      load.for_gradients(STAGES == 2 ? next_tile() : now.tile, now.next_stage);
    products.start_scores(now.stage);
    if constexpr (STAGES == 0) {
      __syncthreads(); // Q has been read
      load.for_gradients(now.tile, now.stage);
    }
    if constexpr (STARTS_VALUES)
      products.start_values(now.stage);
  }
  /// Forms P once S is there.
  __device__ __forceinline__ void recompute_p(float (&x)[COLUMNS8][4], float (&slope)[SLOPES][4],
                                              int first_query) const {
    finish<PIPELINED ? 0 : 1>(products.scores);
    const u32 rows = now.stage + LAYOUT.rows;
    if constexpr (HAS_SCORE)
      scored_probabilities(x, slope, products.scores, rows, key_scale,
                           {p, at.sequence(), now.tile.head}, key, first_query);
    else
      probabilities(x, products.scores, rows, key_scale, mean_scores_of(at, now.tile, key));
    // Queries past the end have a ROW_SHIFT of infinity, which says nothing to a score function
    // that is not finite there. Rows of keys past it are not stored; but dQ sums over keys, and key
    // 0 is not among them where it is separate.
    const bool has_key_apart = WITH_DQ && warp_key < SINK_KEYS;
    const Range queries = tokens_from(first_query, TILE_Q);
    if ((HIDES_SCORES || WITH_DQ || HAS_SCORE) &&
        (any_hidden(at, now.tile.head, queries, tokens_from(warp_key, 16)) || has_key_apart ||
         ends_in_tile(at, first_query))) {
      const auto key_of = [&](int r) { return key[r]; };
      const QueriesHiddenFrom hidden(at, now.tile.head, key_of, first_query);
      hide(x, slope, [&](int r, int column) {
        return hidden(r, column) || (WITH_DQ && key[r] < SINK_KEYS) ||
               is_past_end(at, first_query + column);
      });
    }
  }
  /// Forms P as dV's operand; in 16 bits dV's product is started, if what it takes is there.
  __device__ __forceinline__ RowScales quantize_p(Operand& of_p, const float (&x)[COLUMNS8][4],
                                                  const BlockMaxima& of_block) const {
    float largest[2] = {of_block.p, of_block.p};
    if constexpr (DV16) {
      pack_fragments<TILE_Q / 16>(of_p.x16, x);
      if constexpr (!LAYOUT.dv_dout_is_late)
        issue_rows<TILE_Q / 16>(
            dv, of_p.x16,
            now.stage + (DP16 ? LAYOUT.dv_dout : LAYOUT.dout + first_channel() * (TILE_Q * 2)));
      return {};
    } else {
      if constexpr (!BLOCK_SCALES) {
        largest_probabilities(x, largest);
        quad_max_nan(largest);
      }
      return quantize<false>(of_p, x, largest);
    }
  }
  /// Forms dS once dP is there, and as dK's operand.
  __device__ __forceinline__ RowScales form_ds(Operand& of_ds, float (&ds)[COLUMNS8][4],
                                               const float (&x)[COLUMNS8][4],
                                               const BlockMaxima& of_block) const {
    float largest[2] = {of_block.ds, of_block.ds};
    const u32 stage = now.stage;
    if constexpr (STARTS_VALUES) {
      finish_dp<DV16 ? 1 : 0>(ds, products.value_products,
                              [&](int j) { return Products::minus_delta(stage, j); });
      score_gradients<!BLOCK_SCALES && !DK16>(ds, x, largest);
    } else {
      constexpr int PART = COLUMNS8 / VALUE_PARTS;
#pragma unroll
      for (int part = 0; part < VALUE_PARTS; ++part) {
        float(&of_part)[PART][4] = *reinterpret_cast<float(*)[PART][4]>(ds[part * PART]);
        const float(&p_of_part)[PART][4] =
            *reinterpret_cast<const float(*)[PART][4]>(x[part * PART]);
        const u32 douts = stage + LAYOUT.dout + row_offset<VALUE_ROW_BYTES>(8 * PART * part);
        if constexpr (DP16) {
          const u32 columns = stage + LAYOUT.rows + 8 * PART * part * 4;
          HalfSums<PART> half_dp;
          for_parts_of_dout([&](int first) {
            half_dp.template form<STEPS_OF_PART>(products.values, douts, first);
          });
          half_dp.subtract_delta_of_columns(of_part, columns + ROW_FACTOR * TILE_Q * 4,
                                            columns + ROW_MINUS_DELTA * TILE_Q * 4);
        } else {
          const auto start = [&](int j) { return Products::minus_delta(stage, part * PART + j); };
          for_parts_of_dout([&](int first) {
            issue_values<8 * PART, STEPS_OF_PART>(of_part, products.values, douts, start, first);
          });
        }
        score_gradients<!BLOCK_SCALES && !DK16>(of_part, p_of_part, largest);
      }
    }
    if constexpr (LAYOUT.dv_dout_is_late) {
      __syncthreads(); // dO's rows have been read
      load.late_dv_dout(now.tile, stage);
    }
    of_mean.take(ds);
    if constexpr (DK16) {
      pack_fragments<TILE_Q / 16>(of_ds.x16, ds);
      return {};
    } else {
      if constexpr (!BLOCK_SCALES)
        quad_max_nan(largest);
      return quantize<true>(of_ds, ds, largest);
    }
  }
  /// Calls form(first step) for each part of dO's channels, once it is there.
  template <typename Form>
  __device__ __forceinline__ void for_parts_of_dout(const Form& form) const {
#pragma unroll
    for (int part = 0; part < DOUT_PARTS; ++part) {
      if (part > 0) {
        __syncthreads(); // the part before has been read
        load.part_of_dout(now.tile, now.stage, part);
        cp_async_commit();
        wait_for_tiles();
      }
      form(part * STEPS_OF_PART);
    }
  }
  /// The next tile to come goes where S and dP were read from, which is free.
  __device__ __forceinline__ void refill() const {
    if constexpr (STAGES == 0)
      wait_for_tiles();
    if constexpr (PIPELINED || STAGES == 1) {
      if constexpr (DV16)
        finish_rows<0>(dv);
      wait_for_tiles();
      load.rows(PIPELINED ? walk.next(next_tile()) : next_tile(), now.stage);
      if constexpr (PIPELINED)
        load.for_gradients(next_tile(), now.next_stage);
    }
  }
  /// Two products are under way at a time: dV, dK, and if pipelined the next tile's S and dP.
  __device__ __forceinline__ void add_products(const Operand& of_p, const Operand& of_ds,
                                               const float (&p_factor)[2],
                                               const float (&ds_factor)[2]) const {
    const u32 q_tile = now.stage + LAYOUT.dk_queries, dout_tile = now.stage + LAYOUT.dv_dout;
    if constexpr (DV16 && LAYOUT.dv_dout_is_late)
      issue_rows<TILE_Q / 16>(dv, of_p.x16, dout_tile);
    if constexpr (DK16)
      issue_rows<TILE_Q / 16>(dk, of_ds.x16, q_tile);
    const auto issue = [&](int i) {
      if (i < PRODUCTS_OF_DV)
        blocks[i % 2].template issue<false>(of_p.x8, dout_tile + lane_of_tokens, i);
      else if (i < PRODUCTS)
        blocks[i % 2].template issue<true>(of_ds.x8, q_tile + lane_of_tokens, i - PRODUCTS_OF_DV);
      else if (PIPELINED && i == PRODUCTS)
        products.start_scores(now.next_stage);
      else if (PIPELINED)
        products.start_values(now.next_stage);
    };
    issue(0);
    if constexpr (DK16 && PIPELINED)
      finish_rows<1>(dk);
    issue(1);
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      if (i < PRODUCTS_OF_DV && (PIPELINED || i + 1 < PRODUCTS))
        blocks[i % 2].template add_to<false, 1>(dv, p_factor[0], p_factor[1], i);
      else if (i < PRODUCTS_OF_DV)
        blocks[i % 2].template add_to<false, 0>(dv, p_factor[0], p_factor[1], i);
      else if (PIPELINED || i + 1 < PRODUCTS)
        blocks[i % 2].template add_to<true, 1>(dk, ds_factor[0], ds_factor[1], i - PRODUCTS_OF_DV);
      else
        blocks[i % 2].template add_to<true, 0>(dk, ds_factor[0], ds_factor[1], i - PRODUCTS_OF_DV);
      issue(i + 2);
    }
    if constexpr (DK16 && !PIPELINED)
      finish_rows<0>(dk);
  }
  __device__ __forceinline__ void advance() const {
    now.tile = next_tile();
    if constexpr (HAS_LISTS)
      now.next = walk.next(now.tile);
    const u32 last_stage = now.stage;
    now.stage = now.next_stage;
    now.next_stage = last_stage;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  begin_in_stream_order();
  const int row_in_warp = lane_id() >> 2;
  if (!enter_keys<BLOCK_KV>(p))
    return;
  const KeyHead at = key_head(p);
  const int first_key = block_of_keys(p) * BLOCK_KV;
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  const Loads load = {p, at, walk, shared};
  load.kept(first_key);
  const FusedDq dq(shared + LAYOUT.dq);
  dq.load(p, at, first_key);
  constexpr int LAST_STAGE = STAGES == 2 ? LAYOUT.stage_bytes : 0;
  Position now = {walk.start(at), shared + LAYOUT.first_stage,
                  shared + LAYOUT.first_stage + LAST_STAGE, 0};
  if constexpr (HAS_LISTS)
    now.next = walk.next(now.tile);
  load.channel_scales(now.tile, now.buffer);
  load.channel_scales(walk.next_run(now.tile), now.buffer + 1);
  load.rows(now.tile, now.stage);
  if constexpr (STAGES == 2)
    load.for_gradients(now.tile, now.stage);
  if constexpr (PIPELINED)
    load.rows(walk.next(now.tile), now.next_stage);

  const int warp_key = first_key + warp_id() * 16;
  const int key[2] = {warp_key + row_in_warp, warp_key + row_in_warp + 8};
  const float key_scale = // one for both rows (KEYS_A_SCALE)
      QK16 ? p.softmax_scale * LOG2_E
           : p.k8_scale[at.padded_key() / KEYS_A_SCALE + key_scale_place(key[0])];
  const u32 lane_of_tokens = CHOOSES_REGISTERS ? opaque(token_lane()) : token_lane();
  ScoreRows keys;
  ValueRows values;
  Sums dk, dv;
  MeanGradients of_mean;
  Block blocks[2];
  Scores::Sum own_scores[COLUMNS8][4];
  float own_values[COLUMNS8][4];
  const Products products = {keys, values, score_sums(blocks[PRODUCTS % 2], own_scores),
                             value_sums(blocks[(PRODUCTS + 1) % 2], own_values)};
  const TileWork work = {p,  at,      walk,   load, products, dq,        now,           dk,
                         dv, of_mean, blocks, key,  warp_key, key_scale, lane_of_tokens};
  if (walk.any()) {
    wait_for_tiles();
    keys.load(shared + LAYOUT.keys, warp_id() * 16);
    values.load(shared + LAYOUT.values, warp_id() * 16);
    if constexpr (PIPELINED) {
      products.start_scores(now.stage);
      products.start_values(now.stage);
    }
    for (;;) {
      const float* mean = MeanGradients::mean_of(at, now.tile);
      do {
        work.run();
      } while (!walk.begins_run(now.tile));
      of_mean.add_to(dk, mean, scale_buffer(shared, now.buffer));
      if constexpr (PIPELINED) {
        finish<0>(products.scores);
        finish<0>(products.value_products);
      }
      if (!walk.has(now.tile))
        break;
      rescale_to_run(dk, dv, load, now);
    }
  }
  cp_async_wait<0>();

  if constexpr (DKV_HAS_CHANNEL_SCALES) {
    if (walk.any()) // else there are no scales
      apply_channel_scales(dk, dv, scale_buffer(shared, now.buffer));
  } else {
    dk.subtract_bias();
    dv.subtract_bias();
  }
  const KeyHead end = HAS_LISTS ? reread_key_head(p) : at;
  const int end_key = HAS_LISTS ? reread_block_of_keys(p) * BLOCK_KV : first_key;
  const KeyGradients stored = store_key_gradients(p, end, end_key + warp_id() * 16, dk, dv);
  if constexpr (SINK_KEYS > 0) {
    if (end_key == 0) {
      __syncthreads();
      write_first_key<THREADS>(end, stored);
    }
  }
}
