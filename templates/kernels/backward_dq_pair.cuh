//===- kernels/backward_dq_pair.cuh - dQ of wide heads by pairs of warpgroups, sm_90a --===//
//
// This kernel computes what kernels/backward_dq.cuh computes, warp-specialised as
// kernels/backward_dq_ws.cuh is. Two warpgroups own the same 64 queries (tile/walk/pair.cuh): each
// forms S, P and dP of one half of a step's 128 keys, and sums its channels of dQ over both halves.
// A step:
//
//   wait for S; begin dP; form P; wait for dP; form dS, in 8 bits or 16, for both warpgroups; begin
//   the products of the own half, and those of the other's once its dS is there; begin the next S;
//   add products
//
// The warpgroups meet twice a step: before dS is written, and before the other's dS is read. If dS
// is in 8 bits, its scale is that of all 128 keys, and at the first meeting the warpgroups exchange
// the maxima of their rows. What one warpgroup has read behind a meeting, the other one writes
// again only behind the next meeting.
//
// Keys for S, values, and the keys that dS meets are free at different times of a step. So each
// has a ring of its own; keys and values have one for each warpgroup.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_dq_pair.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/math/query_gradients.cuh"
#include "tile/memory/caller_rows.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/pair.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16 && BLOCK_Q == 64 && GROUP_KV == 128);

constexpr int STEP_KEYS = 128, HALF_KEYS = TILE_ROWS;
constexpr int STEPS_A_RUN = DQ_HAS_CHANNEL_SCALES ? CHANNEL_TOKENS_KV / STEP_KEYS : 1;
constexpr int MEETING = 1; ///< the named barrier

constexpr BackwardDqPairLayout LAYOUT(SHAPE);
constexpr int VECTOR_BYTES = LAYOUT.vector_bytes,
              CHANNEL_SCALES_BYTES = LAYOUT.channel_scales_bytes;
constexpr int SCALE_BUFFERS = LAYOUT.scale_buffers, FRAGMENTS = LAYOUT.fragments;

/// The rings of one half's keys and values, and of all keys that dS meets.
struct Rings {
  Ring<4> keys;
  Ring<4, 1> values;
  Ring<PAIR_WARPS, 1> summed;
  __device__ __forceinline__ Rings(u32 shared, int half)
      : keys{shared + LAYOUT.key_barriers + half * ring_bytes(STAGES)},
        values{shared + LAYOUT.value_barriers + half * ring_bytes(1)},
        summed{shared + LAYOUT.summed_barriers} {}
};
using OnlyState = PipelineState<1>;

using Steps = KeyTiles<STEP_KEYS, STEPS_A_RUN>; ///< a step takes one tile

__device__ __forceinline__ u32 scale_buffer(u32 shared, int half, int buffer, int vector) {
  return shared + LAYOUT.channel_scales + (buffer * 2 + half) * CHANNEL_SCALES_BYTES +
         vector * VECTOR_BYTES;
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const u32 came = shared + LAYOUT.rows_came;
  arrive_expecting(came, BLOCK_Q * (HEAD_DIM + VALUE_ROW_BYTES));
  const s64 first = (at.padded_query() + first_query) * HEAD_DIM;
  bulk_copy(shared + LAYOUT.queries, p.q8 + first, BLOCK_Q * HEAD_DIM, came);
  if constexpr (SCALED_DOUT)
    bulk_copy(shared + LAYOUT.dout, p.dout_rows + first, BLOCK_Q * VALUE_ROW_BYTES, came);
  else
    copy_caller_rows(shared + LAYOUT.dout, p.dout_map, p.dout_rows + first, first_query, at.head,
                     at.batch, came);

  Steps step(at, tokens_from(first_query, BLOCK_Q));
  const s8* keys = p.k8 + at.padded_key() * HEAD_DIM;
  const float* key_scales = p.k8_scale + at.padded_key() / KEYS_A_SCALE;
  const char* summed = DQ16 ? reinterpret_cast<const char*>(p.k_rows + at.padded_key() * HEAD_DIM)
                            : reinterpret_cast<const char*>(p.kt8 + at.padded_key() * HEAD_DIM);
  // Behind the last step S of one more is begun, which nobody reads.
  const auto fill_keys = [&](const Steps& step) {
    const RingState state(step.count());
    for (int half = 0; half < 2; ++half) {
      const Ring<4> ring = Rings(shared, half).keys;
      ring.begin_filling(state, step.more() ? LAYOUT.half_keys_bytes + KEY_SCALES_BYTES : 0);
      if (!step.more())
        continue;
      const int in_shared = state.stage * 2 + half;
      bulk_copy(shared + LAYOUT.keys + in_shared * LAYOUT.half_keys_bytes,
                keys + static_cast<s64>(step.number * 2 + half) * LAYOUT.half_keys_bytes,
                LAYOUT.half_keys_bytes, ring.full(state));
      bulk_copy(shared + LAYOUT.key_scales + in_shared * KEY_SCALES_BYTES,
                key_scales + step.number * (128 / KEYS_A_SCALE), KEY_SCALES_BYTES,
                ring.full(state));
    }
  };
  if (step.any())
    fill_keys(step);
#pragma unroll 1
  for (; step.more(); step = step.next()) {
    const OnlyState state(step.count());
    for (int half = 0; half < 2; ++half) {
      const Ring<4, 1> ring = Rings(shared, half).values;
      ring.begin_filling(state, LAYOUT.half_values_bytes);
      const int key = step.first_key() + half * HALF_KEYS;
      copy_caller_rows(shared + LAYOUT.values + half * LAYOUT.half_values_bytes, p.v_map,
                       p.v_rows + (at.padded_key() + key) * HEAD_DIM, key, at.kv_head, at.batch,
                       ring.full(state));
    }
    fill_keys(step.next());
    const Ring<PAIR_WARPS, 1> ring = Rings(shared, 0).summed;
    const u32 full = ring.full(state);
    const bool has_scales = DQ_HAS_CHANNEL_SCALES && step.begins_run();
    ring.begin_filling(state,
                       2 * LAYOUT.half_summed_bytes + (has_scales ? 2 * CHANNEL_SCALES_BYTES : 0));
    bulk_copy(shared + LAYOUT.summed,
              summed + static_cast<s64>(step.number) * (2 * LAYOUT.half_summed_bytes),
              2 * LAYOUT.half_summed_bytes, full);
    if (has_scales) {
      const float* vectors =
          p.kt8_scale + (at.first_key_scale_block<CHANNEL_TOKENS_KV>() + step.run()) *
                            (CHANNEL_VECTORS * HEAD_DIM);
      for (int half = 0; half < 2; ++half)
        for (int vector = 0; vector < CHANNEL_VECTORS; ++vector)
          bulk_copy(scale_buffer(shared, half, step.buffer<SCALE_BUFFERS>(), vector),
                    vectors + vector * HEAD_DIM + half * SUM_CHANNELS, VECTOR_BYTES, full);
    }
  }
}

/// Processes each step, as the warpgroup of the half `half` of keys and of channels. Arrays are of
/// what is under way from one step to the next.
struct StepWork {
  struct Rows {
    TilesDescriptor tile;
  };
  const Sequence& at;
  const u32& shared;
  const int& half;
  const Rings& rings;
  const Rows &queries, &dout;
  const TilesDescriptor &keys, &key_values; ///< of this half
  const TilesDescriptor&
      summed; ///< this warpgroup's channels of the keys that dS meets, of each half
  const OwnRows& own;
  const RowStart& delta;
  const Range& unmasked;
  Steps& step;
  Sums& dq;
  Scores::Sum (&scores)[COLUMNS8][4];
  int (&values)[COLUMNS8][4]; ///< the bits of dP
  float (&x)[COLUMNS8][4];    ///< P
  int (&products)[SUM_CHANNELS / 8][4];

  __device__ __forceinline__ void begin_scores(const Steps& step) const {
    const RingState state(step.count());
    rings.keys.wait_until_full(state);
    issue_scores(scores, queries, keys.at(state.stage, 2 * LAYOUT.half_keys_bytes));
  }
  __device__ __forceinline__ void run() const {
    const OnlyState state(step.count());
    finish<0>(scores);
    if constexpr (DQ16) { // sums of the last step's products are its results
      finish_rows<0>(dq);
      if (step.count() > 0)
        rings.summed.release(OnlyState(step.count() - 1));
    }
    rings.values.wait_until_full(state);
    issue_value_panels<1>(values, dout, key_values, &delta);
    recompute_p();
    rings.keys.release(RingState(step.count()));
    float ds[COLUMNS8][4], largest[2] = {0, 0};
    // Sums of dP have -delta already.
    finish_dp<0>(ds, values, [](int) { return Quad{-0.0f, -0.0f, -0.0f, -0.0f}; });
    rings.values.release(state);
    score_gradients<!DQ16>(ds, x, largest);

    u32 fragments[FRAGMENTS][4], others[FRAGMENTS][4];
    float product_scale[2];
    quantize_ds(fragments, product_scale, ds, largest);
    write_fragments(gradients_of(half), fragments);
    rings.summed.wait_until_full(state); // with the first of a run its scales have come
    begin_products(fragments, half, false);
    meet_other();
    read_fragments(others, gradients_of(1 - half));
    begin_products(others, 1 - half, true);
    begin_scores(step.next());
    if constexpr (!DQ16) {
      rescale_columns();
      finish<1>(products);
      add_tokens(dq, products, product_scale[0], product_scale[1]);
      rings.summed.release(state);
    }
    step = step.next();
  }

private:
  static __device__ __forceinline__ void meet_other() {
    named_barrier_sync<32 * PAIR_WARPS>(MEETING);
  }
  __device__ __forceinline__ u32 gradients_of(int of_half) const {
    return shared + LAYOUT.score_gradients + of_half * LAYOUT.half_gradients_bytes;
  }
  __device__ __forceinline__ u32 maxima_of(int of_half) const {
    return shared + LAYOUT.maxima + of_half * (BLOCK_Q * 4) +
           (first_token_of_warp(threadIdx.x) + lane_id() / 4) * 4;
  }
  __device__ __forceinline__ void recompute_p() const {
    const RingState state(step.count());
    // A lane's scales of 128 keys are those of their four 32.
    probabilities(x, scores, own.row,
                  read_float2(shared + LAYOUT.key_scales +
                              (state.stage * 2 + half) * KEY_SCALES_BYTES + (lane_id() & 3) * 16 +
                              half * 8));
    if (!step.is_in(unmasked))
      hide(x, HiddenKeys(at, own.query[0], step.first_key() + half * HALF_KEYS, SINK_KEYS));
  }
  /// Forms dS as operands, in 8 bits by the maxima of both halves. Behind it the other warpgroup
  /// has read what this one wrote in the step before.
  __device__ __forceinline__ void quantize_ds(u32 (&fragments)[FRAGMENTS][4],
                                              float (&product_scale)[2],
                                              const float (&ds)[COLUMNS8][4],
                                              float (&largest)[2]) const {
    if constexpr (DQ16) {
      pack_fragments<FRAGMENTS>(fragments, ds);
      meet_other();
    } else {
      quad_max_nan(largest);
      if ((lane_id() & 3) == 0)
        write_float(maxima_of(half), largest[0]), write_float(maxima_of(half) + 32, largest[1]);
      meet_other();
#pragma unroll
      for (int r = 0; r < 2; ++r)
        largest[r] = max_nan(largest[r], read_float(maxima_of(1 - half) + 32 * r));
      const Scale low = fast_scale<SIGNED_LEVELS>(largest[0]);
      const Scale high = fast_scale<SIGNED_LEVELS>(largest[1]);
      product_scale[0] = low.value, product_scale[1] = high.value;
      quantize_fragments<true, FRAGMENTS>(fragments, ds, low.inverse, high.inverse);
    }
  }
  __device__ __forceinline__ void begin_products(const u32 (&a)[FRAGMENTS][4], int of_half,
                                                 bool adds) const {
    const TilesDescriptor tile = summed.at(of_half, LAYOUT.half_summed_bytes);
    if constexpr (DQ16)
      issue_rows(dq, a, tile);
    else
      issue_tokens<true>(products, a, tile, 0, adds);
  }
  __device__ __forceinline__ void rescale_columns() const {
    if (DQ_HAS_CHANNEL_SCALES && step.changes_run())
      dq.rescale_columns_of_warp(
          shared + LAYOUT.ratios + warp_id() * VECTOR_BYTES,
          scale_buffer(shared, half, step.buffer_before<SCALE_BUFFERS>(), CHANNEL_SCALE),
          scale_buffer(shared, half, step.buffer<SCALE_BUFFERS>(), CHANNEL_INVERSE));
  }
};

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const int half = common_to_warp(warp_id() / 4);
  const Rings rings(shared, half);
  const OwnRows own(p, at, first_query + first_token_of_warp(threadIdx.x) + lane_id() / 4);
  const RowStart delta(own.minus_delta, shared + LAYOUT.ones);
  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, own.query, scale_block_of(at, 0) + CHANNEL_INVERSE * HEAD_DIM);
  const StepWork::Rows queries = {TilesDescriptor(shared + LAYOUT.queries)};
  const StepWork::Rows dout = {TilesDescriptor(shared + LAYOUT.dout)};
  // The producer's copies come whether there are keys or not: none may come after the block's end.
  wait_for_phase(shared + LAYOUT.rows_came, 0);

  Steps step(at, tokens_from(first_query, BLOCK_Q));
  const Range unmasked = Steps::unmasked(at, tokens_from(first_query, BLOCK_Q));
  const TilesDescriptor keys =
      TilesDescriptor(shared + LAYOUT.keys).at(half, LAYOUT.half_keys_bytes);
  const TilesDescriptor key_values =
      TilesDescriptor(shared + LAYOUT.values).at(half, LAYOUT.half_values_bytes);
  const TilesDescriptor summed =
      TilesDescriptor(shared + LAYOUT.summed)
          .at(half, DQ16 ? SUM_CHANNELS / 64 * PANEL_BYTES<VALUE_ROW_BYTES>
                         : SUM_CHANNELS * TOKEN_ROW_BYTES);
  Scores::Sum scores[COLUMNS8][4];
  int values[COLUMNS8][4];
  float x[COLUMNS8][4];
  int products[SUM_CHANNELS / 8][4];
  const StepWork work = {at,   shared,     half,   rings,  queries, dout,
                         keys, key_values, summed, own,    delta,   unmasked,
                         step, dq,         scores, values, x,       products};
  if (step.any()) {
    if constexpr (DQ16 && SINK_KEYS == 0) { // else zeros are written while S is under way: C7515
#pragma unroll
      for (int j = 0; j < SUM_CHANNELS / 8; ++j)
        hold(dq.x[j]);
    }
    work.begin_scores(step);
#pragma unroll 1
    do {
      work.run();
    } while (step.more());
    finish<0>(scores);
    if constexpr (DQ16)
      finish_rows<0>(dq);
    if constexpr (DQ_HAS_CHANNEL_SCALES)
      dq.multiply_columns(
          scale_buffer(shared, half, step.last_buffer<SCALE_BUFFERS>(), CHANNEL_SCALE));
  }
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
        for (int half = 0; half < 2; ++half) {
          Rings(shared, half).keys.init();
          Rings(shared, half).values.init();
        }
        Rings(shared, 0).summed.init();
        init_mbarrier(shared + LAYOUT.rows_came, 1);
      },
      [&] {
        RowStart::write_ones(shared + LAYOUT.ones, threadIdx.x);
        fence_async_proxy();
      },
      [&] { produce(p, shared, at, first_query); }, [&] { consume(p, shared, at, first_query); });
}
