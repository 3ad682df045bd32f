//===- kernels/backward_dq_ws.cuh - dQ, warp-specialised, sm_90a -------------------===//
//
// This kernel computes what kernels/backward_dq.cuh computes, by warps of different duties, if S is
// in INT8 and dS has a scale for each query and group of keys or is in 16 bits. One thread copies
// tiles in bulk into a ring of stages; warpgroups of 64 queries each read them.
//
// Beside dQ each warpgroup has accumulators of S, which P replaces, of dP, which dS replaces, and,
// if dS is in INT8, of products that are added to dQ. A step waits for S, begins dP, forms P, waits
// for dP, forms dS, begins the products and S of the next step, waits for the products and adds
// them. Only a wait for all products crosses the loop's end (C7514).
//
// A stage holds what is read at one time: keys and values of its own step, and the keys that dS of
// the step before meets. Hence a stage is free once dP is formed.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/backward_dq_ws.cuh"
#include "tile/math/quantizer.cuh"
#include "tile/math/query_gradients.cuh"
#include "tile/memory/caller_rows.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/roles.cuh"

static_assert(!QK16, "bulk copies bring swizzled tiles, which the 8-bit copies are");
static_assert(DQ16 || !BLOCK_SCALES, "warpgroups share no scale");

constexpr BackwardDqWsLayout LAYOUT(SHAPE);
constexpr int STEP_KEYS = LAYOUT.step_keys, STEPS_A_RUN = LAYOUT.steps_a_run;
constexpr int KEY_TILES = STEP_KEYS / TOKENS_PER_TILE;
constexpr int STEP_COLUMNS8 = STEP_KEYS / 8;
constexpr int WARPGROUPS = BLOCK_Q / 64; ///< that consume
constexpr int CHANNEL_SCALES_BYTES = LAYOUT.channel_scales_bytes,
              SCALE_BUFFERS = LAYOUT.scale_buffers;
constexpr int PANEL = PANEL_BYTES<VALUE_ROW_BYTES>;

using KeyRing = Ring<BLOCK_Q / 16>;

/// A step takes one tile. All warpgroups take all tiles: 128 queries or fewer see the same ones,
/// with one exception at most.
using Steps = KeyTiles<STEP_KEYS, STEPS_A_RUN>;

__device__ __forceinline__ u32 scale_buffer(u32 shared, int buffer, int vector) {
  return shared + LAYOUT.channel_scales + buffer * CHANNEL_SCALES_BYTES + vector * HEAD_DIM * 4;
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const u32 came = shared + LAYOUT.rows_came;
  const int queries = minimum(BLOCK_Q, at.padded_q() - first_query);
  arrive_expecting(came, queries * (HEAD_DIM + VALUE_ROW_BYTES));
  bulk_copy(shared + LAYOUT.queries, p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
            queries * HEAD_DIM, came);
  if constexpr (SCALED_DOUT) {
    bulk_copy(shared + LAYOUT.dout, p.dout_rows + (at.padded_query() + first_query) * HEAD_DIM,
              queries * VALUE_ROW_BYTES, came);
  } else {
    for (int row = 0; row < queries; row += TILE_ROWS)
      copy_caller_rows(shared + LAYOUT.dout + row * VALUE_ROW_BYTES, p.dout_map,
                       p.dout_rows + (at.padded_query() + first_query + row) * HEAD_DIM,
                       first_query + row, at.head, at.batch, came);
  }

  const KeyRing ring = {shared + LAYOUT.barriers};
  const s8* keys = p.k8 + at.padded_key() * HEAD_DIM;
  const float* key_scales = p.k8_scale + at.padded_key() / KEYS_A_SCALE;
  const char* summed = DQ16 ? reinterpret_cast<const char*>(p.k_rows + at.padded_key() * HEAD_DIM)
                            : reinterpret_cast<const char*>(p.kt8 + at.padded_key() * HEAD_DIM);
  Steps step(at, tokens_from(first_query, BLOCK_Q)), last = step;
  if (!step.any())
    return;
#pragma unroll 1
  for (bool has_keys = true; has_keys;) {
    const RingState state(step.count());
    const u32 full = ring.full(state);
    has_keys = step.more();
    const bool has_summed = step.count() > 0; // the keys of the last step that dS meets
    const bool has_scales = DQ_HAS_CHANNEL_SCALES && has_summed && last.begins_run();
    ring.begin_filling(
        state, (has_summed ? LAYOUT.summed_bytes : 0) + (has_scales ? CHANNEL_SCALES_BYTES : 0) +
                   (has_keys ? LAYOUT.keys_bytes + LAYOUT.values_bytes + KEY_SCALES_BYTES : 0));
    if (has_summed)
      bulk_copy(shared + LAYOUT.summed + state.stage * LAYOUT.summed_bytes,
                summed + static_cast<s64>(last.number) * LAYOUT.summed_bytes, LAYOUT.summed_bytes,
                full);
    // The run that had this buffer is over: this stage was released after the run behind it had
    // begun.
    if (has_scales)
      bulk_copy(scale_buffer(shared, last.buffer<SCALE_BUFFERS>(), 0),
                scale_block_of(at, last.run()), CHANNEL_SCALES_BYTES, full);
    if (has_keys) {
      bulk_copy(shared + LAYOUT.keys + state.stage * LAYOUT.keys_bytes,
                keys + static_cast<s64>(step.number) * LAYOUT.keys_bytes, LAYOUT.keys_bytes, full);
      bulk_copy(shared + LAYOUT.key_scales + state.stage * KEY_SCALES_BYTES,
                key_scales + step.first_key() / 128 * (128 / KEYS_A_SCALE), KEY_SCALES_BYTES, full);
      for (int tile = 0; tile < KEY_TILES; ++tile) {
        const int key = step.first_key() + tile * TILE_ROWS;
        copy_caller_rows<KEY_TILES * PANEL>(
            shared + LAYOUT.values + state.stage * LAYOUT.values_bytes + tile * PANEL, p.v_map,
            p.v_rows + (at.padded_key() + key) * HEAD_DIM, key, at.kv_head, at.batch, full);
      }
    }
    last = step;
    step = step.next();
  }
}

/// Processes each step, as one warpgroup. Arrays are of what is under way from one step to the
/// next.
struct StepWork {
  struct Rows {
    TilesDescriptor tile;
  };
  const QueryHead& at;
  const u32& shared;
  const KeyRing& ring;
  const Rows &queries, &dout;
  const TilesDescriptor &keys, &key_values, &summed; ///< of the first stage
  const OwnRows& own;
  const RowStart& delta;
  const Range& unmasked;
  Steps& step;
  Sums& dq;
  Scores::Sum (&scores)[STEP_COLUMNS8][4];
  int (&values)[STEP_COLUMNS8][4]; ///< the bits of dP
  float (&x)[STEP_COLUMNS8][4];    ///< P
  float (&ds)[STEP_COLUMNS8][4];
  int (&products)[HEAD_DIM / 8][4];
  float (&product_scale)[2];
  float (&ds_sum)[2]; ///< SUMS_DS: of the thread's rows and columns

  /// The warpgroup's queries. Computed where they are needed: registers are short.
  static __device__ __forceinline__ Range own_queries() {
    return tokens_from(reread_block_of_queries() * BLOCK_Q + reread_thread() / 128 * 64, 64);
  }
  // Behind the last step S of a stage that is there is begun, and nobody reads it: products never
  // begin under a condition.
  __device__ __forceinline__ void begin_scores(const Steps& step) const {
    issue_scores<KEY_TILES>(scores, queries,
                            keys.at(RingState(step.count()).stage, LAYOUT.keys_bytes));
  }
  __device__ __forceinline__ void run() const {
    finish<0>(scores);
    issue_value_panels<KEY_TILES>(
        values, dout, key_values.at(RingState(step.count()).stage, LAYOUT.values_bytes), &delta);
    recompute_p();
    float largest[2] = {0, 0};
    // Sums of dP have -delta already.
    finish_dp<0>(ds, values, [](int) { return Quad{-0.0f, -0.0f, -0.0f, -0.0f}; });
    // All of the stage has been read, the keys that dS meets by the last step's products.
    ring.release(RingState(step.count()));
    score_gradients<!DQ16>(ds, x, largest);
    if constexpr (SUMS_DS)
      add_rows(ds_sum, ds);
    begin_products(largest);
    begin_scores(step.next());
    // In 16 bits products have nothing to be added to: the next step waits for them and for S.
    if constexpr (DQ16)
      finish_rows<0>(dq);
    else
      add_products();
    step = step.next();
  }

private:
  __device__ __forceinline__ void recompute_p() const {
    const u32 key_scales = shared + LAYOUT.key_scales +
                           RingState(step.count()).stage * KEY_SCALES_BYTES +
                           (reread_thread() & 3) * 16;
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
      const float2 scales = read_float2(key_scales + (KEY_TILES == 2 ? tile : step.number & 1) * 8);
      if constexpr (HAS_SCORE)
        sloped_probabilities(&x[tile * COLUMNS8], &scores[tile * COLUMNS8], own, scales, at,
                             step.first_key() + tile * TOKENS_PER_TILE);
      else
        probabilities(&x[tile * COLUMNS8], &scores[tile * COLUMNS8], own.row, scales);
    }
    if (!step.is_in(unmasked)) {
      const int thread = reread_thread();
      const int first = own_queries().begin + thread % 128 / 32 * 16 + thread % 32 / 4;
#pragma unroll
      for (int tile = 0; tile < KEY_TILES; ++tile)
        hide(&x[tile * COLUMNS8],
             KeysHiddenFrom<COLUMNS8>(at, first, step.first_key() + tile * TOKENS_PER_TILE,
                                      SINK_KEYS));
    }
  }
  __device__ __forceinline__ void begin_products(float (&largest)[2]) const {
    const RingState next(step.next().count()); // the keys that dS meets come to this stage
    const TilesDescriptor tiles = summed.at(next.stage, LAYOUT.summed_bytes);
    if constexpr (DQ16) {
      u32 ds16[STEP_KEYS / 16][4];
      pack_fragments<STEP_KEYS / 16>(ds16, ds);
      ring.wait_until_full(next);
      issue_rows(dq, ds16, tiles);
    } else {
      quad_max_nan(largest);
      const Scale low = fast_scale<SIGNED_LEVELS>(largest[0]);
      const Scale high = fast_scale<SIGNED_LEVELS>(largest[1]);
      product_scale[0] = low.value, product_scale[1] = high.value;
      u32 ds8[STEP_KEYS / 32][4];
      quantize_fragments<true, STEP_KEYS / 32>(ds8, ds, low.inverse, high.inverse);
      ring.wait_until_full(next); // with the first of a run its scales have come
      issue_tokens<true>(products, ds8, tiles);
    }
  }
  /// While S of the next step is under way.
  __device__ __forceinline__ void add_products() const {
    if (DQ_HAS_CHANNEL_SCALES && step.changes_run())
      dq.rescale_columns_of_warp(
          shared + LAYOUT.ratios + reread_thread() / 32 * (HEAD_DIM * 4),
          scale_buffer(shared, step.buffer_before<SCALE_BUFFERS>(), CHANNEL_SCALE),
          scale_buffer(shared, step.buffer<SCALE_BUFFERS>(), CHANNEL_INVERSE));
    finish<1>(products);
    add_tokens(dq, products, product_scale[0], product_scale[1]);
  }
};

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const int warpgroup = common_to_warp(warp_id() / 4);
  const KeyRing ring = {shared + LAYOUT.barriers};
  const OwnRows own(p, at, first_query + warp_id() * 16 + lane_id() / 4, at.padded_q() - 1);
  const RowStart delta(own.minus_delta, shared + LAYOUT.ones);
  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, own.query, scale_block_of(at, 0) + CHANNEL_INVERSE * HEAD_DIM);
  const TilesDescriptor base(shared);
  const StepWork::Rows queries = {(base + LAYOUT.queries).at(warpgroup, 64 * SCORE_ROW_BYTES)};
  const StepWork::Rows dout = {(base + LAYOUT.dout).at(warpgroup, 64 * VALUE_ROW_BYTES)};
  // The producer's copies come whether there are keys or not: none may come after the block's end.
  wait_for_phase(shared + LAYOUT.rows_came, 0);

  Steps step(at, tokens_from(first_query, BLOCK_Q));
  Scores::Sum scores[STEP_COLUMNS8][4];
  int values[STEP_COLUMNS8][4];
  float x[STEP_COLUMNS8][4], ds[STEP_COLUMNS8][4];
  int products[HEAD_DIM / 8][4];
  float product_scale[2], ds_sum[2] = {0, 0};
  const TilesDescriptor keys = base + LAYOUT.keys, key_values = base + LAYOUT.values,
                        summed = base + LAYOUT.summed;
  const Range unmasked = Steps::unmasked(at, StepWork::own_queries());
  const StepWork work = {at,     shared, ring,  queries,  dout,          keys,  key_values,
                         summed, own,    delta, unmasked, step,          dq,    scores,
                         values, x,      ds,    products, product_scale, ds_sum};
  if (step.any()) {
    ring.wait_until_full(RingState(0));
    work.begin_scores(step);
#pragma unroll 1
    do {
      work.run();
    } while (step.more());
    finish<0>(scores);
    if constexpr (DQ_HAS_CHANNEL_SCALES)
      dq.multiply_columns(scale_buffer(shared, step.last_buffer<SCALE_BUFFERS>(), CHANNEL_SCALE));
  }
  finish_dq(p, dq.x, ds_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const QueryHead at = query_head(p);
  const int first_query = block_of_queries() * BLOCK_Q;

  run_roles<BLOCK_Q / 16>(
      [&] {
        KeyRing{shared + LAYOUT.barriers}.init();
        init_mbarrier(shared + LAYOUT.rows_came, 1);
      },
      [&] {
        RowStart::write_ones(shared + LAYOUT.ones, threadIdx.x);
        fence_async_proxy();
      },
      [&] { produce(p, shared, at, first_query); }, [&] { consume(p, shared, at, first_query); });
}
