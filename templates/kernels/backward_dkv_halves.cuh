//===- kernels/backward_dkv_halves.cuh - dK and dV of very wide heads, warp-specialised, sm_90a
//===//
//
// It computes as kernels/backward_dkv_team.cuh does, by a producer, which copies, and a pair of
// warpgroups that own the same 64 keys (tile/walk/pair.cuh). Half of the channels of both gradients
// are more than a warpgroup holds: so of two blocks, neighbours in the grid, one forms dK and the
// other dV, for which both form P. A step takes a pair of tiles of 64 queries, of which each
// warpgroup forms P or dS of one, over all channels, and hands it to the other; each sums half of
// the channels over both. A run's last pair may have but one tile: it comes twice, and has no part
// the second time. A step:
//
//   S, panel by panel; P; of dK dP, panel by panel, and dS; meet; hand it over; meet; products
//
// A warpgroup writes again what the other one has read only after they have met once more.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "tile/memory/panels.cuh"
#include "tile/walk/query_pairs.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16 && BLOCK_KV == 64 && GROUP_Q == TILE_Q && DK16 == DV16 && SCALED_DOUT != DV16);

/// The two tiles of a step, and the next step's first.
struct StepTiles {
  QueryTile tile[2], next;
  __device__ __forceinline__ StepTiles(const QueryTiles& walk, const QueryTile& first)
      : tile{first, walk.second_of_pair(first)}, next(walk.next(tile[1])) {}
  __device__ __forceinline__ bool comes_again(int half) const {
    return half == 1 && tile[0].flat == tile[1].flat;
  }
};

/// The gradient that a block forms.
template <bool IS_DV> struct Gradient {
  static constexpr int PANELS = IS_DV ? SCORE_PANELS : SCORE_PANELS + VALUE_PANELS; ///< of a step
  const Params& p;
  const KeyHead& at;
  u32 shared;
  const QueryTiles& walk;

  /// One thread copies everything.
  __device__ __forceinline__ void produce(int first_key) const {
    const PairCopies copy{p, at};
    copy.keys(shared + LAYOUT.own_scores, shared + LAYOUT.own_values, first_key,
              shared + LAYOUT.own_came);
    int step = 0;
    QueryTile first = walk.start(at);
#pragma unroll 1
    while (walk.has(first)) {
      const StepTiles of(walk, first);
#pragma unroll 1
      for (int panel = 0; panel < PANELS; ++panel) {
        fill_panels(step * PANELS + panel, panel, of);
        // Behind the panels that the ring has room for, units have places, too.
        if (panel == PANEL_STAGES)
          fill_unit(copy, 2 * step, of.tile[0]);
        if (panel == PANEL_STAGES + 1 && LAYOUT.unit_stages == 2)
          fill_unit(copy, 2 * step + 1, of.tile[1]);
      }
      if (LAYOUT.unit_stages == 1 || PANELS <= PANEL_STAGES + 1)
        fill_unit(copy, 2 * step + 1, of.tile[1]);
      first = of.next;
      ++step;
    }
  }

  __device__ __forceinline__ void consume(int first_key) const {
    const int half = common_to_warp(warp_id() / 4);
    const u32 rows = shared + LAYOUT.rows + half * LAYOUT.rows_bytes;
    const PairScores scores_of(p, at, shared + LAYOUT.own_scores, shared + LAYOUT.own_values,
                               rows - PAIRS.tile_rows);
    Sums sums;
    // Whether queries see the keys or not: no copy may come after the block's end.
    wait_for_phase(shared + LAYOUT.own_came, 0);
    int step = 0;
    QueryTile first = walk.start(at), last = first;
#pragma unroll 1
    while (walk.has(first)) {
      if (step > 0 && walk.begins_run(first))
        rescale(sums, last, &first);
      last = first;
      const StepTiles of(walk, first);
      const int first_query = (half ? of.tile[1] : of.tile[0]).first_query();
      float x[COLUMNS8][4]; // P, then of dK dS
      {
        Scores::Sum scores[COLUMNS8][4];
        form_products<SCORE_PANELS>(
            shared, half, step * PANELS, shared + LAYOUT.own_scores,
            [&](u64 a, u64 b, bool begins) { Scores::multiply(scores, a, b, !begins); });
        finish<0>(scores);
        scores_of.recompute_p(x, scores, first_query, of.comes_again(half));
      }
      float largest[2] = {0, 0};
      if constexpr (IS_DV) {
        largest_probabilities(x, largest);
      } else {
        int values[COLUMNS8][4];
        form_products<VALUE_PANELS>(
            shared, half, step * PANELS + SCORE_PANELS, shared + LAYOUT.own_values,
            [&](u64 a, u64 b, bool begins) { wgmma_16<Element>(values, a, b, !begins); });
        float ds[COLUMNS8][4];
        scores_of.template form_ds<!DK16, 0>(ds, values, x, largest);
#pragma unroll
        for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            x[j][i] = ds[j][i];
        }
      }
      u32 fragments[2][FRAGMENTS][4]; // of the own tile, and of the other
      float2 scale[2];
      exchange<!IS_DV>(fragments, scale, x, largest, shared, half);
      add_units<!IS_DV>(sums, fragments, scale, shared, half, 2 * step);
      first = of.next;
      ++step;
    }
    if (step > 0) // else there are no scales
      rescale(sums, last, nullptr);
    store(sums, first_key, half);
  }

private:
  /// A panel of Q or dO of each tile; the vectors of queries come where panel 0 has been read, so
  /// that nobody needs the last step's.
  __device__ __forceinline__ void fill_panels(int number, int panel, const StepTiles& of) const {
    const PanelRing::State state(number);
    const int of_values = panel - SCORE_PANELS;
    const bool with_rows = panel == PANEL_STAGES;
    for (int half = 0; half < 2; ++half) {
      const QueryTile& tile = of.tile[half];
      const PanelRing ring = panel_ring(shared, half);
      const u32 to = panel_address(shared, half, state.stage), full = ring.full(state);
      ring.begin_filling(state, PANEL + (with_rows ? LAYOUT.rows_bytes : 0));
      if (with_rows)
        bulk_copy(shared + LAYOUT.rows + half * LAYOUT.rows_bytes, p.q_rows + tile.rows(),
                  LAYOUT.rows_bytes, full);
      if (of_values < 0)
        bulk_copy(to, p.q8 + tile.elements() + panel * PANEL, PANEL, full);
      else if (SCALED_DOUT || PACKED)
        bulk_copy(to, p.dout_rows + tile.elements() + of_values * (PANEL / 2), PANEL, full);
      else
        tensor_copy(to, p.dout_map, of_values * 64, tile.first_query(), tile.head, at.batch, full);
    }
  }
  __device__ __forceinline__ void fill_unit(const PairCopies& copy, int number,
                                            const QueryTile& tile) const {
    const UnitRing ring = unit_ring(shared);
    const UnitRing::State unit(number);
    const u32 to = unit_address(shared, unit.stage);
    ring.begin_filling(unit, LAYOUT.unit_bytes);
    if constexpr (!DK16)
      bulk_copy(to, (IS_DV ? p.dot8 : p.qt8) + tile.elements(), LAYOUT.unit_bytes, ring.full(unit));
    else if constexpr (IS_DV)
      copy.rows(to, p.dout_map, p.dout_rows, tile, ring.full(unit));
    else
      copy.rows(to, p.q_map, p.query_rows, tile, ring.full(unit));
  }
  /// Gives the vectors of a tile's scale block, from this warpgroup's channels on.
  __device__ __forceinline__ const float* scales_of(const QueryTile& tile) const {
    return (IS_DV ? p.dot8_scale : p.qt8_scale) +
           (at.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.run()) *
               (CHANNEL_VECTORS * HEAD_DIM) +
           first_channel();
  }
  /// Rescales the sums from the scales of a tile's run to those of another one's, or, where there
  /// is none, multiplies them by their scales.
  __device__ __forceinline__ void rescale(Sums& sums, const QueryTile& from,
                                          const QueryTile* to) const {
    if constexpr (!DK16) {
      const float* scale = scales_of(from) + CHANNEL_SCALE * HEAD_DIM;
      if (to)
        sums.rescale_columns(scale, scales_of(*to) + CHANNEL_INVERSE * HEAD_DIM);
      else
        sums.multiply_columns(scale);
    }
  }
  /// Stores a warpgroup's channels. Its threads meet at a barrier of its own before the first key's
  /// are written again, which come from the pre-pass as in write_first_key().
  __device__ __forceinline__ void store(const Sums& sums, int first_key, int half) const {
    constexpr int FIRST_KEY_BARRIER = 2;
    const s64 stride = IS_DV ? p.dv_stride_s : p.dk_stride_s;
    const int channels = IS_DV ? p.value_channels : p.channels, own = keys_of_warp(p);
    const float factor = IS_DV ? 1.0f : p.softmax_scale;
    Element* to =
        (IS_DV ? p.dv + at.first_key(p.dv_stride_b, p.dv_stride_s) + at.kv_head * p.dv_stride_h
               : p.dk + at.first_key(p.dk_stride_b, p.dk_stride_s) + at.kv_head * p.dk_stride_h) +
        first_channel();
    store_rows(to + own * stride, stride, at.seq_kv() - own, channels, sums.x, factor, factor);
    if (SINK_KEYS == 0 || first_key > 0)
      return;
    named_barrier_sync<128>(FIRST_KEY_BARRIER + half);
    const int scale_blocks = ceil_div(at.padded_q(), CHANNEL_TOKENS_Q);
    for (int channel = threadIdx.x % 128; channel < SUM_CHANNELS; channel += 128) {
      float sum = 0;
      for (int head = at.kv_head * at.heads; head < (at.kv_head + 1) * at.heads; ++head) {
        const float* of_head = p.sink_partial +
                               at.first_scale_block<CHANNEL_TOKENS_Q>(head) * (2 * HEAD_DIM) +
                               (IS_DV ? HEAD_DIM : 0) + first_channel() + channel;
        for (int block = 0; block < scale_blocks; ++block)
          sum += of_head[block * (2 * HEAD_DIM)];
      }
      if (is_channel(first_channel() + channel, channels))
        to[channel].bits = static_cast<u16>(pack<Element>(sum * factor, 0.0f));
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_keys<BLOCK_KV>(p))
    return;
  const KeyHead at = key_head(p, blockIdx.y / 2, blockIdx.z);
  const bool is_dv = blockIdx.y % 2 != 0;
  const int first_key = block_of_keys(p) * BLOCK_KV;
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  const Gradient<false> dk = {p, at, shared, walk};
  const Gradient<true> dv = {p, at, shared, walk};
  run_roles<PAIR_WARPS>(
      [&] {
        for (int half = 0; half < 2; ++half)
          panel_ring(shared, half).init();
        unit_ring(shared).init();
        init_mbarrier(shared + LAYOUT.own_came, 1);
      },
      Nothing(), [&] { is_dv ? dv.produce(first_key) : dk.produce(first_key); },
      [&] { is_dv ? dv.consume(first_key) : dk.consume(first_key); });
}
