//===- kernels/backward_ws.cuh - dQ, dK and dV at once, warp-specialised, sm_90a ---===//
//
// The backward of kernels/backward_dkv.cuh with dQ (tile/dq/fused_dq.cuh), S in INT8 and all else
// in 16 bits, by warps of different duties. One thread copies: what stays of the block's 128 keys,
// and tiles of 64 queries into rings of stages. Two warpgroups of 64 keys each form
//   S^T  = K Q^T             P^T = exp2(S^T - lse)
//   dV  += P^T dO            dP^T = V dO^T            dS = P (dP - delta)
//   dK  += dS^T Q            dQ  += dS K
// where dQ sums over the keys of both: they exchange dS through shared memory, and each takes half
// of dQ's channels. Its sums go to memory by bulk copies that add, a part of each warp's.
//
// The order of a tile t is this where products overlap (switches below; each S belongs to one place
// of two):
//   wait for all: dP(t), dK(t-1)         hand back dK's stage t-1
//   start dV(t), early S(t+1)            dS(t) in 16 bits, to shared memory; DS_WRITTEN
//   start late S(t+1), dQ(t), dK(t)      wait for dV(t), S(t+1); hand back the rows' stage t
//   P(t+1)                               wait for dQ(t), stage it and start adding it
//   start dP(t+1)
// Only a wait for all crosses the loop's end (kernels/README.md: what ptxas does).
//
// Who waits for whom, beside full and empty stages (tile/memory/ring.cuh):
// - Barrier DS_WRITTEN, of both warpgroups, once a tile: before it each thread has written its part
//   of dS and made it known to the products; behind it dQ may read all of it. There are two
//   buffers, in turn: a warp comes to the barrier after its products with the other one have
//   finished, so that behind it that may be written again.
// - A warp's staged part of dQ is written again once the lane that started its copy has seen it
//   read; __syncwarp() tells the others. Before a copy starts, each lane makes what it wrote known
//   to copies, and __syncwarp() tells the lane that starts it.
// - The two halves of a stage are given back separately, for the rows of tile t + 2 are to come
// before
//   dK(t) has finished. Each warp does so for itself, after its products that read it have
//   finished: one warp's wait says nothing of another's.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_ws.cuh"
#include "tile/dq/dq_sums16.cuh"
#include "tile/math/fused_gradients.cuh"
#include "tile/math/fused_products.cuh"
#include "tile/math/key_gradients.cuh"
#include "tile/memory/caller_rows.cuh"
#include "tile/memory/ring.cuh"
#include "tile/memory/stage_tile.cuh"
#include "tile/walk/roles.cuh"

static_assert(WITH_DQ && !QK16 && DV16 && DQ16 && DK16 && !SCALED_DOUT && BLOCK_KV == 128);

constexpr int CONSUMING_WARPS = BLOCK_KV / 16, CONSUMERS = 32 * CONSUMING_WARPS;
/// K and V as A of S and dP stay in registers, where there are some left.
constexpr bool KEPT_IN_REGISTERS = HEAD_DIM == 64;

constexpr BackwardWsLayout LAYOUT(SHAPE, DQ_SUM16);

using QueryRing = Ring<CONSUMING_WARPS>;
__device__ __forceinline__ QueryRing ring_of_rows(u32 shared) { return {shared + LAYOUT.barriers}; }
__device__ __forceinline__ QueryRing ring_of_dk(u32 shared) {
  return {shared + LAYOUT.barriers + QueryRing::BYTES};
}
__device__ __forceinline__ u32 stage_of(u32 shared, const RingState& state) {
  return shared + LAYOUT.first_stage + state.stage * LAYOUT.stage_bytes;
}

// Each duty reads its head and its walk again (backward_dkv_ws.cuh).

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, int first_key) {
  const KeyHead at = reread_key_head(p);
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  if (!walk.any())
    return;
  const u32 came = shared + LAYOUT.kept_came;
  const s64 before = (at.padded_key() + first_key) * HEAD_DIM;
  arrive_expecting(came, LAYOUT.kept_bytes);
  bulk_copy(shared + LAYOUT.keys, p.k8 + before, BLOCK_KV * SCORE_ROW_BYTES, came);
  bulk_copy(shared + LAYOUT.key_rows, p.k_rows + before, BLOCK_KV * VALUE_ROW_BYTES, came);
#pragma unroll
  for (int key = 0; key < BLOCK_KV; key += TILE_ROWS)
    copy_caller_rows(shared + LAYOUT.values + row_offset<VALUE_ROW_BYTES>(key), p.v_map,
                     p.v_rows + before + key * HEAD_DIM, first_key + key, at.kv_head, at.batch,
                     came);

  int count = 0;
#pragma unroll 1
  for (QueryTile tile = walk.start(at); walk.has(tile); tile = walk.next(tile), ++count) {
    const RingState state(count);
    const u32 stage = stage_of(shared, state);
    const QueryRing rows = ring_of_rows(shared), of_dk = ring_of_dk(shared);
    const int first_query = tile.first_query();
    rows.wait_until_empty(state);
    StageTile{stage + LAYOUT.tile}.write_in_head(tile);
    arrive_expecting(rows.full(state), LAYOUT.rows + LAYOUT.rows_bytes);
    bulk_copy(stage + LAYOUT.queries, p.q8 + tile.elements(), TILE_Q * SCORE_ROW_BYTES,
              rows.full(state));
    bulk_copy(stage + LAYOUT.rows, p.q_rows + tile.rows(), LAYOUT.rows_bytes, rows.full(state));
    copy_caller_rows(stage + LAYOUT.dout, p.dout_map, p.dout_rows + tile.elements(), first_query,
                     tile.head, at.batch, rows.full(state));
    of_dk.wait_until_empty(state);
    StageTile{stage + LAYOUT.tile}.write_flat(tile);
    arrive_expecting(of_dk.full(state), LAYOUT.query_rows_bytes + LAYOUT.factors_bytes);
    if constexpr (DQ_SUM16)
      bulk_copy(stage + LAYOUT.factors, p.dq_factor + static_cast<u64>(tile.flat) * TILE_Q,
                LAYOUT.factors_bytes, of_dk.full(state));
    copy_caller_rows(stage + LAYOUT.query_rows, p.q_map, p.query_rows + tile.elements(),
                     first_query, tile.head, at.batch, of_dk.full(state));
  }
}

/// Adds a warp's part of dQ to the sums of its 16 queries of the stage's tile.
__device__ __forceinline__ void add_dq(DqSum* sums, u32 shared, u32 stage, const float (*dq)[4]) {
  const int warp = reread_thread() / 32;
  const u32 own = shared + LAYOUT.dq + warp * LAYOUT.warp_dq_bytes;
  if (elected())
    bulk_wait_read<0>();
  __syncwarp();
  if constexpr (DQ_SUM16) {
    write_dq16<DQ_CHANNELS>(own, dq, read_factors(stage + LAYOUT.factors + warp % 4 * DQ_ROWS * 2));
  } else {
#pragma unroll
    for (int j = 0; j < DQ_CHANNELS / 8; ++j)
      write_float4(own + dq_place(j) * 4, dq[j]);
  }
  fence_async_proxy();
  __syncwarp();
  if (elected()) {
    const u64 tile = StageTile{stage + LAYOUT.tile}.flat();
    bulk_add(sums + tile * (TILE_Q * HEAD_DIM) +
                 (warp % 4 * HEAD_DIM + warp / 4 * DQ_CHANNELS) * DQ_ROWS,
             own, LAYOUT.warp_dq_bytes);
    bulk_commit();
  }
}

/// dQ takes dP's place where it takes as many registers: blocks of different sizes do not share.
template <int N>
__device__ __forceinline__ auto block_of_dq(float (&products)[N][4], float (&)[N][4])
    -> float (&)[N][4] {
  return products;
}
template <int N, int M>
__device__ __forceinline__ auto block_of_dq(float (&)[N][4], float (&own)[M][4])
    -> float (&)[M][4] {
  return own;
}

/// Does a warpgroup's work. Each has code of its own, because descriptors that differ between them
/// would be formed again for each product.
template <int WARPGROUP>
__device__ __forceinline__ void consume(const Params& p, u32 shared, int first_key) {
  const KeyHead at = reread_key_head(p);
  const int tiles = QueryTiles(at, tokens_from(first_key, BLOCK_KV)).tiles(at);
  const QueryRing rows = ring_of_rows(shared), of_dk = ring_of_dk(shared);
  const float key_scale = p.k8_scale[at.padded_key() / KEYS_A_SCALE +
                                     key_scale_place(first_key_of_warp(p) + lane_id() / 4)];
  KeptRows<SCORE_ROW_BYTES, KEPT_IN_REGISTERS> keys;
  KeptRows<VALUE_ROW_BYTES, KEPT_IN_REGISTERS> values;

  Sums dk, dv;
  Scores::Sum scores[COLUMNS8][4];
  float products[COLUMNS8][4]; // dP, then dQ if it is as large
  float own_dq[DQ_CHANNELS / 8][4];
  auto& dq = block_of_dq(products, own_dq);
  Probabilities probabilities;
  int count = 0;
  const auto stage = [&](int count) { return stage_of(shared, RingState(count)); };
  const Address16 base = Address16::of_address(shared);
  const auto stage_address = [&](int count) {
    return base + LAYOUT.first_stage + RingState(count).stage * LAYOUT.stage_bytes;
  };
  const auto start_scores = [&](int count) {
    issue_scores(scores, keys, stage_address(count) + LAYOUT.queries);
  };
  const auto start_values = [&](int count) {
    issue_values(products, values, stage_address(count) + LAYOUT.dout);
  };
  const auto start_dv = [&] {
    issue_from_registers(dv, probabilities.p16, stage_address(count) + LAYOUT.dout);
  };
  const auto recompute_p = [&](int count) {
    const int first_query = StageTile{stage(count) + LAYOUT.tile}.first_query();
    probabilities.take(scores, at, stage(count) + LAYOUT.rows, key_scale, first_query);
  };
  const auto meet = [&](int phase) {
    arrive(shared + LAYOUT.ds_written);
    wait_for_phase(shared + LAYOUT.ds_written, phase & 1, "dS of the other");
  };
  /// dS from P and dP, to shared memory; dQ and dK are started.
  const auto start_dq_and_dk = [&] {
    const int ds = LAYOUT.ds + (count & 1) * LAYOUT.ds_bytes;
    const Address16 ds_address = base + ds, queries = stage_address(count) + LAYOUT.query_rows;
    u32 ds16[STEPS_Q][4];
    form_ds(ds16, probabilities, scores, products, stage(count) + LAYOUT.rows);
    write_rows(shared + ds, ds16);
    fence_async_proxy();
    of_dk.wait_until_full(RingState(count));
    meet(count);
    if constexpr (!EARLY_SCORES)
      start_scores(count + 1);
    issue_dq(dq, ds_address, base + LAYOUT.key_rows, WARPGROUP);
    if constexpr (HEAD_DIM == 128) // registers are short
      issue_from_rows(dk, ds_address + WARPGROUP * (TILE_ROWS * DS_ROW_BYTES), queries);
    else
      issue_from_registers(dk, ds16, queries);
  };

  if (tiles > 0) {
    wait_for_phase(shared + LAYOUT.kept_came, 0);
    keys.load(shared + LAYOUT.keys + WARPGROUP * (TILE_ROWS * SCORE_ROW_BYTES));
    values.load(shared + LAYOUT.values + WARPGROUP * (TILE_ROWS * VALUE_ROW_BYTES));
    rows.wait_until_full(RingState(0));
    start_scores(0);
    finish<0>(scores);
    recompute_p(0);
    start_values(0);
    bool more;
    do {
      more = count + 1 < tiles;
      // Behind the last tile S and dP of a stage that is there are formed: products cannot start
      // under a condition.
      if (more)
        rows.wait_until_full(RingState(count + 1));
      finish<0>(products);
      finish_rows<0>(dk); // of the last tile
      if (count > 0)
        of_dk.release(RingState(count - 1));
      start_dv();
      if constexpr (EARLY_SCORES)
        start_scores(count + 1);
      start_dq_and_dk();
      finish<2>(scores);
      finish_rows<2>(dv);
      rows.release(RingState(count));
      recompute_p(count + 1);
      finish<1>(dq);
      add_dq(dq_sums_of(p), shared, stage(count), dq);
      start_values(count + 1);
      ++count;
    } while (more);
    finish<0>(products);
    finish_rows<0>(dk);
  }

  // The copies read shared memory, which the block gives back when it ends.
  if (elected())
    bulk_wait_read<0>();
  const KeyHead end = reread_key_head(p);
  const KeyGradients stored = store_key_gradients(p, end, first_key_of_warp(p), dk, dv);
  if constexpr (SINK_KEYS > 0) {
    if (reread_block_of_keys(p) == 0) {
      meet(count); // that key's row is written
      write_first_key<CONSUMERS>(end, stored);
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
        ring_of_rows(shared).init();
        ring_of_dk(shared).init();
        init_mbarrier(shared + LAYOUT.kept_came, 1);
        init_mbarrier(shared + LAYOUT.ds_written, CONSUMERS);
      },
      Nothing(), [&] { produce(p, shared, first_key); },
      [&] {
        if (warp_id() < 4)
          consume<0>(p, shared, first_key);
        else
          consume<1>(p, shared, first_key);
      });
}
