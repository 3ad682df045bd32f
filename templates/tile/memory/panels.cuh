//===- tile/memory/panels.cuh - Tiles come in panels, for a pair of warpgroups, sm_90a ----===//
//
// Where shared memory does not hold what S and dP take of the other side's tokens, it comes panel
// by panel of 64 tokens and 128 bytes (tile/memory/swizzle.cuh), in a ring of each warpgroup's.
// What gradients take of them comes in whole units of 64 tokens, which both warpgroups read.
// layouts/halves.cuh says where all lies.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/halves.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/math/products.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/pair.cuh"

constexpr HalvesLayout LAYOUT(SHAPE);
constexpr int FRAGMENTS = LAYOUT.fragments;
constexpr int PANEL = LAYOUT.PANEL, PANEL_STAGES = LAYOUT.PANEL_STAGES;
constexpr int SCORE_PANELS = HEAD_DIM / 128, VALUE_PANELS = HEAD_DIM / 64;

using PanelRing = Ring<4, PANEL_STAGES>;
using UnitRing = Ring<PAIR_WARPS, LAYOUT.unit_stages>;

__device__ __forceinline__ PanelRing panel_ring(u32 shared, int half) {
  return {shared + LAYOUT.panel_barriers + half * ring_bytes(PANEL_STAGES)};
}
__device__ __forceinline__ UnitRing unit_ring(u32 shared) {
  return {shared + LAYOUT.unit_barriers};
}
__device__ __forceinline__ u32 panel_address(u32 shared, int half, int stage) {
  return shared + LAYOUT.panels + half * LAYOUT.half_panels_bytes + stage * PANEL;
}
__device__ __forceinline__ u32 unit_address(u32 shared, int stage) {
  return shared + LAYOUT.units + stage * LAYOUT.unit_bytes;
}
/// The warpgroups of a pair meet.
__device__ __forceinline__ void meet_other() {
  constexpr int MEETING = 1;
  named_barrier_sync<32 * PAIR_WARPS>(MEETING);
}

/// Forms products of the block's own rows with COUNT panels of a half, from number `first` in the
/// ring on, by product(a, b, begins) for each 32 bytes along rows. A panel is released when the
/// product behind it has been issued and its own has ended.
template <int COUNT, typename Product>
__device__ __forceinline__ void form_products(u32 shared, int half, int first, u32 rows,
                                              const Product& product) {
  const PanelRing ring = panel_ring(shared, half);
#pragma unroll
  for (int panel = 0; panel < COUNT; ++panel) {
    const PanelRing::State state(first + panel);
    ring.wait_until_full(state);
    const u64 a = matrix_descriptor<128>(rows + panel * PANEL);
    const u64 b = matrix_descriptor<128>(panel_address(shared, half, state.stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      product(a + step * 2, b + step * 2, panel == 0 && step == 0);
    wgmma_commit();
    if (panel > 0) {
      wgmma_wait<1>();
      ring.release(PanelRing::State(first + panel - 1));
    }
  }
  wgmma_wait<0>();
  ring.release(PanelRing::State(first + COUNT - 1));
}

/// Where a half's P or dS lies, as fragments of A, and this thread's scales of its rows.
__device__ __forceinline__ u32 handed_by(u32 shared, int half) {
  return shared + LAYOUT.handed + half * LAYOUT.half_handed_bytes;
}
__device__ __forceinline__ u32 scales_by(u32 shared, int half) {
  return shared + LAYOUT.scales + half * (128 * 8) + threadIdx.x % 128 * 8;
}
/// P or dS of the own half becomes operand A, in 8 bits by the largest magnitudes of its rows, and
/// that of the other half comes beside it.
template <bool SIGNED>
__device__ __forceinline__ void exchange(u32 (&fragments)[2][FRAGMENTS][4], float2 (&scale)[2],
                                         const float (&x)[8][4], float (&largest)[2], u32 shared,
                                         int half) {
  if constexpr (LAYOUT.in_16_bits) {
    pack_fragments<FRAGMENTS>(fragments[0], x);
  } else {
    constexpr int LEVELS = SIGNED ? SIGNED_LEVELS : UNSIGNED_LEVELS;
    quad_max_nan(largest);
    const Scale low = fast_scale<LEVELS>(largest[0]), high = fast_scale<LEVELS>(largest[1]);
    scale[0] = {low.value, high.value};
    quantize_fragments<SIGNED, FRAGMENTS>(fragments[0], x, low.inverse, high.inverse);
  }
  meet_other(); // the step before has been read
  write_fragments(handed_by(shared, half), fragments[0]);
  if constexpr (!LAYOUT.in_16_bits) {
    const float own[2] = {scale[0].x, scale[0].y};
    write_float2(scales_by(shared, half), own);
  }
  meet_other();
  read_fragments(fragments[1], handed_by(shared, 1 - half));
  if constexpr (!LAYOUT.in_16_bits)
    scale[1] = read_float2(scales_by(shared, 1 - half));
}

/// Adds to sums, in 8 bits, the products of the own half's operand and of the other's with their
/// units, number `count` and the next one in the ring, times the scales of rows.
template <bool SIGNED>
__device__ __forceinline__ void add_units(Sums& sums, const u32 (&fragments)[2][2][4],
                                          const float2 (&scale)[2], u32 shared, int half,
                                          int count) {
  constexpr int PARTS = SUM_CHANNELS / 64;
  const UnitRing ring = unit_ring(shared);
  const TilesDescriptor units =
      TilesDescriptor(shared + LAYOUT.units).at(half, SUM_CHANNELS * TOKEN_ROW_BYTES);
  const UnitRing::State unit[2] = {UnitRing::State(count + half),
                                   UnitRing::State(count + 1 - half)};
  Block blocks[2];
  ring.wait_until_full(unit[0]);
  ring.wait_until_full(unit[1]);
#pragma unroll
  for (int i = 0; i <= 2 * PARTS; ++i) {
    if (i < 2 * PARTS)
      blocks[i % 2].template issue<SIGNED>(
          fragments[i / PARTS], units.at(unit[i / PARTS].stage, LAYOUT.unit_bytes), i % PARTS);
    if (i > 0) {
      const int done = i - 1;
      const float2 factor = scale[done / PARTS];
      if (i < 2 * PARTS)
        blocks[done % 2].template add_to<SIGNED, 1>(sums, factor.x, factor.y, done % PARTS);
      else
        blocks[done % 2].template add_to<SIGNED, 0>(sums, factor.x, factor.y, done % PARTS);
      if (done % PARTS == PARTS - 1)
        ring.release(unit[done / PARTS]);
    }
  }
  sums.bias[0] = sums.bias[1] = 0; // for ptxas to see that there is none
}
/// Does so in 16 bits, in the order of units: there is a place for one.
template <bool SIGNED>
__device__ __forceinline__ void add_units(Sums& sums, const u32 (&fragments)[2][4][4],
                                          const float2 (&)[2], u32 shared, int half, int count) {
  const UnitRing ring = unit_ring(shared);
  const TilesDescriptor channels =
      TilesDescriptor(shared + LAYOUT.units).at(half, SUM_CHANNELS / 64 * PANEL);
#pragma unroll
  for (int of = 0; of < 2; ++of) {
    const UnitRing::State unit(count + of);
    ring.wait_until_full(unit);
    u32 a[4][4]; // behind the wait: ptxas says C7519 else
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[k][i] = of == half ? fragments[0][k][i] : fragments[1][k][i];
    }
    issue_rows(sums, a, channels);
    finish_rows<0>(sums);
    ring.release(unit);
  }
}
