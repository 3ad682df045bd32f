//===- kernels/backward_dq_halves.cuh - dQ of very wide heads, warp-specialised, sm_90a --===//
//
// What kernels/backward_dq_team.cuh computes, by a producer, which copies in bulk, and a pair of
// warpgroups that own the same 64 queries (tile/walk/pair.cuh). A step takes two groups of 64 keys.
// Each warpgroup forms dS of one of them, over all channels, and hands it to the other; each sums
// half of the channels of dQ over both groups. Keys and values come a panel at a time, because
// shared memory does not hold them beside the rows of Q and dO. A step:
//
//   S, panel by panel; P; dP, panel by panel; meet; dS, for both; meet; products of both groups
//
// What one warpgroup has read behind a meeting the other one writes again only behind the next.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_dq_halves.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/math/query_gradients.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/pair.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16 && BLOCK_Q == 64 && GROUP_KV == TOKENS_PER_TILE);

constexpr BackwardDqHalvesLayout LAYOUT(SHAPE);
constexpr int STEP_KEYS = 2 * GROUP_KV;
constexpr int STEPS_A_RUN = DQ_HAS_CHANNEL_SCALES ? CHANNEL_TOKENS_KV / STEP_KEYS : 1;
constexpr int MEETING = 1; ///< the named barrier
constexpr int FRAGMENTS = LAYOUT.fragments;

constexpr int PANEL = LAYOUT.PANEL, PANEL_STAGES = LAYOUT.PANEL_STAGES;
constexpr int STEPS_A_PANEL = 4; ///< of 32 bytes along the rows of a panel
constexpr int KEY_PANELS = HEAD_DIM / 128, VALUE_PANELS = HEAD_DIM / 64;
constexpr int PANELS = KEY_PANELS + VALUE_PANELS; ///< of a step and half
static_assert(PANELS % PANEL_STAGES == 0, "a panel's stage is known as the kernel is compiled");

using PanelRing = Ring<4, PANEL_STAGES>;
using SummedRing = Ring<PAIR_WARPS, LAYOUT.summed_stages>;
using Steps = KeyTiles<STEP_KEYS, STEPS_A_RUN>; ///< a step takes one tile

__device__ __forceinline__ PanelRing panel_ring(u32 shared, int half) {
  return {shared + LAYOUT.panel_barriers + half * ring_bytes(PANEL_STAGES)};
}
__device__ __forceinline__ SummedRing summed_ring(u32 shared) {
  return {shared + LAYOUT.summed_barriers};
}
__device__ __forceinline__ u32 panel_address(u32 shared, int half, int stage) {
  return shared + LAYOUT.panels + half * LAYOUT.half_panels_bytes + stage * PANEL;
}
__device__ __forceinline__ void meet_other() { named_barrier_sync<32 * PAIR_WARPS>(MEETING); }

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const u32 came = shared + LAYOUT.rows_came;
  arrive_expecting(came, BLOCK_Q * (HEAD_DIM + VALUE_ROW_BYTES));
  const s64 own = (at.padded_query() + first_query) * HEAD_DIM;
  bulk_copy(shared + LAYOUT.queries, p.q8 + own, BLOCK_Q * HEAD_DIM, came);
#pragma unroll 1
  for (int panel = 0; panel < VALUE_PANELS; ++panel) {
    const u32 to = shared + LAYOUT.dout + panel * PANEL;
    if (SCALED_DOUT || PACKED)
      bulk_copy(to, p.dout_rows + own + panel * (PANEL / 2), PANEL, came);
    else
      tensor_copy(to, p.dout_map, panel * 64, first_query, at.head, at.batch, came);
  }
  const s64 head_keys = at.padded_key() * HEAD_DIM;
  const char* summed = DQ16 ? reinterpret_cast<const char*>(p.k_rows + head_keys)
                            : reinterpret_cast<const char*>(p.kt8 + head_keys);
  const SummedRing of_summed = summed_ring(shared);
  const auto fill_unit = [&](const Steps& step, int half) {
    const SummedRing::State unit(2 * step.count() + half);
    of_summed.begin_filling(unit, LAYOUT.unit_bytes);
    bulk_copy(shared + LAYOUT.summed + unit.stage * LAYOUT.unit_bytes,
              summed + static_cast<s64>(2 * step.number + half) * LAYOUT.unit_bytes,
              LAYOUT.unit_bytes, of_summed.full(unit));
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
        const int of_values = panel - KEY_PANELS;
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
      if (panel == PANEL_STAGES + 1 && LAYOUT.summed_stages == 2)
        fill_unit(step, 1);
    }
    if (LAYOUT.summed_stages == 1)
      fill_unit(step, 1);
  }
}

/// Issues products with a panel, from each of its rows' 32 bytes: product(a, b, first).
template <typename Product>
__device__ __forceinline__ void issue_panel(u32 rows, u32 panel, bool begins,
                                            const Product& product) {
  const u64 a = matrix_descriptor<128>(rows), b = matrix_descriptor<128>(panel);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS_A_PANEL; ++step)
    product(a + step * 2, b + step * 2, begins && step == 0);
  wgmma_commit();
}

/// Forms products with COUNT panels of a half, the step's panels from FIRST on. A panel is released
/// when the product behind it has been issued and its own has ended.
template <int FIRST, int COUNT, typename Product>
__device__ __forceinline__ void form_products(u32 shared, int half, int step, u32 rows,
                                              const Product& product) {
  const PanelRing ring = panel_ring(shared, half);
#pragma unroll
  for (int panel = 0; panel < COUNT; ++panel) {
    PanelRing::State state(FIRST + panel);
    state.parity = (step * (PANELS / PANEL_STAGES) + (FIRST + panel) / PANEL_STAGES) & 1;
    ring.wait_until_full(state);
    issue_panel(rows + panel * PANEL, panel_address(shared, half, state.stage), panel == 0,
                product);
    if (panel > 0) {
      wgmma_wait<1>();
      ring.release(PanelRing::State(FIRST + panel - 1));
    }
  }
  wgmma_wait<0>();
  ring.release(PanelRing::State(FIRST + COUNT - 1));
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const int half = common_to_warp(warp_id() / 4);
  const SummedRing of_summed = summed_ring(shared);
  const OwnRows own(p, at, first_query + first_token_of_warp(threadIdx.x) + lane_id() / 4);
  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, own.query, scale_block_of(at, 0) + CHANNEL_INVERSE * HEAD_DIM);
  // The producer's copies come whether there are keys or not: none may come after the block's end.
  wait_for_phase(shared + LAYOUT.rows_came, 0);
  const auto gradients_of = [&](int of_half) {
    return shared + LAYOUT.score_gradients + of_half * LAYOUT.half_gradients_bytes;
  };
  const auto scales_of = [&](int of_half) {
    return shared + LAYOUT.scales + of_half * (128 * 8) + threadIdx.x % 128 * 8;
  };
  // This warpgroup's channels of a unit.
  const TilesDescriptor summed =
      TilesDescriptor(shared + LAYOUT.summed)
          .at(half, DQ16 ? SUM_CHANNELS / 64 * PANEL : SUM_CHANNELS * TOKEN_ROW_BYTES);

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
      form_products<0, KEY_PANELS>(shared, half, step.count(), shared + LAYOUT.queries,
                                   [&](u64 a, u64 b, bool begins) {
                                     Scores::multiply(scores, a, b, !begins);
                                   });
      finish<0>(scores);
      probabilities(x, scores, own.row, key_scales);
    }
    if (!step.is_in(unmasked))
      hide(x, HiddenKeys(at, own.query[0], first_key, SINK_KEYS));
    int values[COLUMNS8][4];
    form_products<KEY_PANELS, VALUE_PANELS>(shared, half, step.count(), shared + LAYOUT.dout,
                                            [&](u64 a, u64 b, bool begins) {
                                              wgmma_16<Element>(values, a, b, !begins);
                                            });
    float ds[COLUMNS8][4], largest[2] = {0, 0};
    finish_dp<0>(ds, values, [&](int) {
      return Quad{own.minus_delta[0], own.minus_delta[0], own.minus_delta[1], own.minus_delta[1]};
    });
    score_gradients<!DQ16>(ds, x, largest);

    u32 fragments[2][FRAGMENTS][4]; // of the own group, and of the other
    float2 scale[2];
    if constexpr (DQ16) {
      pack_fragments<FRAGMENTS>(fragments[0], ds);
    } else {
      quad_max_nan(largest);
      const Scale low = fast_scale<SIGNED_LEVELS>(largest[0]);
      const Scale high = fast_scale<SIGNED_LEVELS>(largest[1]);
      scale[0] = {low.value, high.value};
      quantize_fragments<true, FRAGMENTS>(fragments[0], ds, low.inverse, high.inverse);
    }
    meet_other(); // the step before has been read
    write_fragments(gradients_of(half), fragments[0]);
    if constexpr (!DQ16) {
      const float own_scale[2] = {scale[0].x, scale[0].y};
      write_float2(scales_of(half), own_scale);
    }
    meet_other();
    read_fragments(fragments[1], gradients_of(1 - half));
    if constexpr (!DQ16)
      scale[1] = read_float2(scales_of(1 - half));

    if constexpr (DQ16) { // in the order of keys: there is a place for one unit
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        const SummedRing::State unit(2 * step.count() + of);
        of_summed.wait_until_full(unit);
        u32 a[FRAGMENTS][4];
#pragma unroll
        for (int k = 0; k < FRAGMENTS; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            a[k][i] = of == half ? fragments[0][k][i] : fragments[1][k][i];
        }
        issue_rows(dq, a, summed);
        finish_rows<0>(dq);
        of_summed.release(unit);
      }
    } else {
      constexpr int PARTS = SUM_CHANNELS / 64;
      Block blocks[2];
      const SummedRing::State unit[2] = {SummedRing::State(2 * step.count() + half),
                                         SummedRing::State(2 * step.count() + 1 - half)};
      of_summed.wait_until_full(unit[0]);
      of_summed.wait_until_full(unit[1]);
#pragma unroll
      for (int i = 0; i <= 2 * PARTS; ++i) {
        if (i < 2 * PARTS)
          blocks[i % 2].issue<true>(fragments[i / PARTS],
                                    summed.at(unit[i / PARTS].stage, LAYOUT.unit_bytes), i % PARTS);
        if (i > 0) {
          const int done = i - 1;
          const float2 factor = scale[done / PARTS];
          if (i < 2 * PARTS)
            blocks[done % 2].add_to<true, 1>(dq, factor.x, factor.y, done % PARTS);
          else
            blocks[done % 2].add_to<true, 0>(dq, factor.x, factor.y, done % PARTS);
          if (done % PARTS == PARTS - 1)
            of_summed.release(unit[done / PARTS]);
        }
      }
      dq.bias[0] = dq.bias[1] = 0; // for ptxas to see that there is none
    }
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
        summed_ring(shared).init();
        init_mbarrier(shared + LAYOUT.rows_came, 1);
      },
      Nothing(), [&] { produce(p, shared, at, first_query); },
      [&] { consume(p, shared, at, first_query); });
}
