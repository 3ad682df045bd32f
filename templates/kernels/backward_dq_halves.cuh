//===- kernels/backward_dq_halves.cuh - dQ of very wide heads, warp-specialised, sm_90a --===//
//
// It computes as kernels/backward_dq_team.cuh does, by a producer, which copies, and a pair of
// warpgroups that own the same 64 queries (tile/walk/pair.cuh). A step takes two groups of 64 keys.
// Each warpgroup forms dS of one of them, over all channels, and hands it to the other; each sums
// half of the channels of dQ over both groups. Keys and values come a panel at a time, because
// shared memory does not hold them beside the rows of Q and dO. A step:
//
//   S, panel by panel; P; dP, panel by panel; meet; dS, for both; meet; products of both groups
//
// A warpgroup writes again what the other one has read only after they have met once more.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "tile/math/query_gradients.cuh"
#include "tile/memory/panels.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16 && BLOCK_Q == 64 && GROUP_KV == TOKENS_PER_TILE);

constexpr int STEP_KEYS = 2 * GROUP_KV;
constexpr int STEPS_A_RUN = DQ_HAS_CHANNEL_SCALES ? CHANNEL_TOKENS_KV / STEP_KEYS : 1;

constexpr int PANELS = SCORE_PANELS + VALUE_PANELS; ///< of a step and half

using Steps = KeyTiles<STEP_KEYS, STEPS_A_RUN>; ///< a step takes one tile

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const u32 came = shared + LAYOUT.own_came;
  arrive_expecting(came, BLOCK_Q * (HEAD_DIM + VALUE_ROW_BYTES));
  const s64 own = (at.padded_query() + first_query) * HEAD_DIM;
  bulk_copy(shared + LAYOUT.own_scores, p.q8 + own, BLOCK_Q * HEAD_DIM, came);
#pragma unroll 1
  for (int panel = 0; panel < VALUE_PANELS; ++panel) {
    const u32 to = shared + LAYOUT.own_values + panel * PANEL;
    if (SCALED_DOUT || PACKED)
      bulk_copy(to, p.dout_rows + own + panel * (PANEL / 2), PANEL, came);
    else
      tensor_copy(to, p.dout_map, panel * 64, first_query, at.head, at.batch, came);
  }
  const s64 head_keys = at.padded_key() * HEAD_DIM;
  const char* summed = DQ16 ? reinterpret_cast<const char*>(p.k_rows + head_keys)
                            : reinterpret_cast<const char*>(p.kt8 + head_keys);
  const UnitRing of_units = unit_ring(shared);
  const auto fill_unit = [&](const Steps& step, int half) {
    const UnitRing::State unit(2 * step.count() + half);
    of_units.begin_filling(unit, LAYOUT.unit_bytes);
    bulk_copy(unit_address(shared, unit.stage),
              summed + static_cast<s64>(2 * step.number + half) * LAYOUT.unit_bytes,
              LAYOUT.unit_bytes, of_units.full(unit));
  };
#pragma unroll 1
  for (Steps step(at, tokens_from(first_query, BLOCK_Q)); step.more(); step = step.next()) {
#pragma unroll 1
    for (int panel = 0; panel < PANELS; ++panel) {
      const PanelRing::State state(step.count() * PANELS + panel);
      for (int half = 0; half < 2; ++half) {
        const PanelRing ring = panel_ring(shared, half);
        const int key = step.first_key() + half * GROUP_KV;
        const s64 first = head_keys + static_cast<s64>(key) * HEAD_DIM;
        const u32 to = panel_address(shared, half, state.stage), full = ring.full(state);
        const int of_values = panel - SCORE_PANELS;
        ring.begin_filling(state, PANEL);
        if (of_values < 0)
          bulk_copy(to, p.k8 + first + panel * PANEL, PANEL, full);
        else if (PACKED)
          bulk_copy(to, p.v_rows + first + of_values * (PANEL / 2), PANEL, full);
        else
          tensor_copy(to, p.v_map, of_values * 64, key, at.kv_head, at.batch, full);
      }
      // Behind the panels that the ring has room for, units have places, too.
      if (panel == PANEL_STAGES)
        fill_unit(step, 0);
      if (panel == PANEL_STAGES + 1 && LAYOUT.unit_stages == 2)
        fill_unit(step, 1);
    }
    if (LAYOUT.unit_stages == 1)
      fill_unit(step, 1);
  }
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const int half = common_to_warp(warp_id() / 4);
  const OwnRows own(p, at, first_query + first_token_of_warp(threadIdx.x) + lane_id() / 4);
  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, own.query, scale_block_of(at, 0) + CHANNEL_INVERSE * HEAD_DIM);
  // The producer's copies come whether there are keys or not: none may come after the block's end.
  wait_for_phase(shared + LAYOUT.own_came, 0);

  Steps step(at, tokens_from(first_query, BLOCK_Q));
  const Range unmasked = Steps::unmasked(at, tokens_from(first_query, BLOCK_Q));
#pragma unroll 1
  for (; step.more(); step = step.next()) {
    if (DQ_HAS_CHANNEL_SCALES && step.changes_run())
      dq.rescale_columns(scale_block_of(at, step.run() - 1) + CHANNEL_SCALE * HEAD_DIM,
                         scale_block_of(at, step.run()) + CHANNEL_INVERSE * HEAD_DIM);
    const int first_key = step.first_key() + half * GROUP_KV;
    const s64 padded_key = at.padded_key() + first_key;
    const float2 key_scales = __ldg(reinterpret_cast<const float2*>(
        p.k8_scale + (padded_key >> 7) * (128 / KEYS_A_SCALE) +
        key_scale_place(static_cast<int>(padded_key & 127) + 2 * (lane_id() & 3))));
    float x[COLUMNS8][4];
    {
      Scores::Sum scores[COLUMNS8][4];
      form_products<SCORE_PANELS>(
          shared, half, step.count() * PANELS, shared + LAYOUT.own_scores,
          [&](u64 a, u64 b, bool begins) { Scores::multiply(scores, a, b, !begins); });
      finish<0>(scores);
      probabilities(x, scores, own.row, key_scales);
    }
    if (!step.is_in(unmasked))
      hide(x, HiddenKeys(at, own.query[0], first_key, SINK_KEYS));
    int values[COLUMNS8][4];
    form_products<VALUE_PANELS>(
        shared, half, step.count() * PANELS + SCORE_PANELS, shared + LAYOUT.own_values,
        [&](u64 a, u64 b, bool begins) { wgmma_16<Element>(values, a, b, !begins); });
    float ds[COLUMNS8][4], largest[2] = {0, 0};
    finish_dp<0>(ds, values, [&](int) {
      return Quad{own.minus_delta[0], own.minus_delta[0], own.minus_delta[1], own.minus_delta[1]};
    });
    score_gradients<!DQ16>(ds, x, largest);

    u32 fragments[2][FRAGMENTS][4]; // of the own group, and of the other
    float2 scale[2];
    exchange<true>(fragments, scale, ds, largest, shared, half);
    add_units<true>(dq, fragments, scale, shared, half, 2 * step.count());
  }
  if constexpr (DQ_HAS_CHANNEL_SCALES)
    dq.multiply_columns(scale_block_of(at, maximum(0, step.number - 1) / STEPS_A_RUN) +
                        CHANNEL_SCALE * HEAD_DIM);
  finish_dq(p, dq.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const QueryHead at = query_head(p);
  const int first_query = block_of_queries() * BLOCK_Q;
  run_roles<PAIR_WARPS>(
      [&] {
        for (int half = 0; half < 2; ++half)
          panel_ring(shared, half).init();
        unit_ring(shared).init();
        init_mbarrier(shared + LAYOUT.own_came, 1);
      },
      Nothing(), [&] { produce(p, shared, at, first_query); },
      [&] { consume(p, shared, at, first_query); });
}
