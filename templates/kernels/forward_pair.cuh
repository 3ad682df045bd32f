//===- kernels/forward_pair.cuh - O and lse of very wide heads, warp-specialised, sm_90a --===//
//
// It computes as kernels/forward_team.cuh does, by a producer, which copies, and a pair of
// warpgroups that own the same 64 queries (tile/walk/pair.cuh). A step takes two groups of 64 keys.
// Each warpgroup forms S and P of one of them, over all channels, and hands P to the other; each
// sums half of the channels of O over both groups. A step:
//
//   wait for the group's keys; S; meet, to exchange maxima; P; meet, to exchange P; products of
//   both groups with the own channels of V, 64 at a time
//
// A warpgroup writes again what the other one has read only after they have met once more.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "layouts/forward_pair.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/math/pair_softmax.cuh"
#include "tile/memory/ring.cuh"
#include "tile/walk/pair.cuh"
#include "tile/walk/roles.cuh"
#include "tile/walk/tiles.cuh"

static_assert(!QK16 && BLOCK_Q == 64 && GROUP_KV == TOKENS_PER_TILE);

constexpr ForwardPairLayout LAYOUT(SHAPE);
constexpr int STEP_KEYS = 2 * GROUP_KV, STEPS_A_RUN = CHANNEL_TOKENS_KV / STEP_KEYS;
constexpr int MEETING = 1; ///< the named barrier

using KeyRing = Ring<4>; ///< of one warpgroup's keys
using ValueRing = Ring<PAIR_WARPS, LAYOUT.VALUE_STAGES>;
using Steps = KeyTiles<STEP_KEYS, STEPS_A_RUN>; ///< a step takes one tile

__device__ __forceinline__ KeyRing key_ring(u32 shared, int half) {
  return {shared + LAYOUT.key_barriers + half * ring_bytes(STAGES)};
}
__device__ __forceinline__ ValueRing value_ring(u32 shared) {
  return {shared + LAYOUT.value_barriers};
}
__device__ __forceinline__ void meet_other() { named_barrier_sync<32 * PAIR_WARPS>(MEETING); }

/// Gives the scales of V's transposed copy, of a scale block, from the first channel of this
/// warpgroup on.
__device__ __forceinline__ const float* channel_scales_of(const QueryHead& at, int scale_block,
                                                          int vector) {
  return at.p.vt8_scale +
         (at.first_key_scale_block<CHANNEL_TOKENS_KV>() + scale_block) *
             (CHANNEL_VECTORS * HEAD_DIM) +
         vector * HEAD_DIM + first_channel();
}

/// One thread copies everything.
__device__ __forceinline__ void produce(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const u32 came = shared + LAYOUT.queries_came;
  arrive_expecting(came, BLOCK_Q * HEAD_DIM);
  bulk_copy(shared + LAYOUT.queries, p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
            BLOCK_Q * HEAD_DIM, came);
  const s8* keys = p.k8 + at.padded_key() * HEAD_DIM;
  const s8* values = p.vt8 + at.padded_key() * HEAD_DIM;
  const ValueRing of_values = value_ring(shared);
#pragma unroll 1
  for (Steps step(at, tokens_from(first_query, BLOCK_Q)); step.more(); step = step.next()) {
    const s64 first = static_cast<s64>(step.first_key()) * HEAD_DIM;
    for (int half = 0; half < 2; ++half) {
      const KeyRing ring = key_ring(shared, half);
      const RingState state(step.count());
      ring.begin_filling(state, LAYOUT.unit_bytes);
      bulk_copy(shared + LAYOUT.keys + (state.stage * 2 + half) * LAYOUT.unit_bytes,
                keys + first + half * LAYOUT.unit_bytes, LAYOUT.unit_bytes, ring.full(state));
    }
    for (int half = 0; half < 2; ++half) {
      const ValueRing::State state(2 * step.count() + half);
      of_values.begin_filling(state, LAYOUT.unit_bytes);
      bulk_copy(shared + LAYOUT.values + state.stage * LAYOUT.unit_bytes,
                values + first + half * LAYOUT.unit_bytes, LAYOUT.unit_bytes,
                of_values.full(state));
    }
  }
}

/// O starts from V_0 over the scales of its channels, times P's 255, where key 0 is separate.
__device__ __forceinline__ void start_from_sink(Sums& o, const QueryHead& at) {
  const Params& p = at.p;
  const Element* value =
      p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h + first_channel();
  const float* inverse = channel_scales_of(at, 0, CHANNEL_INVERSE);
#pragma unroll
  for (int pair = 0; pair < SUM_CHANNELS / 16; ++pair) {
    const float4 levels = read_columns(inverse, pair);
    const float factor[4] = {levels.x, levels.y, levels.z, levels.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int octet = pair * 16 + half * 8;
      const bool there = is_channel(first_channel() + octet, p.value_channels);
      const float2 v = unpack<Element>(
          there ? __ldg(reinterpret_cast<const u32*>(value + octet + (lane_id() & 3) * 2)) : 0);
      float(&x)[4] = o.x[2 * pair + half];
      x[0] = x[2] = v.x * factor[2 * half] * UNSIGNED_LEVELS;
      x[1] = x[3] = v.y * factor[2 * half + 1] * UNSIGNED_LEVELS;
    }
  }
}

/// The end: lse, and O over its rows' sums.
__device__ __forceinline__ void finish_rows(const Params& p, const PairSoftmax& softmax, Sums& o,
                                            u32 shared) {
  const QueryHead at = reread_query_head(p);
  const int thread = reread_thread(), half = thread / 128;
  const int row = first_token_of_warp(thread) + (thread & 31) / 4;
  const int warp_query = reread_block_of_queries() * BLOCK_Q + first_token_of_warp(thread);
  const auto place = [&](int of_half, int r) {
    return shared + LAYOUT.maxima + (of_half * BLOCK_Q + row + 8 * r) * 4;
  };
  float sum[2], inverse[2];
  meet_other(); // maxima have been read
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = quad_sum(softmax.sum[r]);
    if ((thread & 3) == 0)
      write_float(place(half, r), sum[r]);
  }
  meet_other();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += read_float(place(1 - half, r));
    const int query = warp_query + (thread & 31) / 4 + 8 * r;
    const bool fully_masked = sees_nothing(at, query);
    inverse[r] = __fdiv_rn(1.0f, sum[r]);
    if (fully_masked) {
#pragma unroll
      for (int j = 0; j < SUM_CHANNELS / 8; ++j)
        o.x[j][2 * r] = o.x[j][2 * r + 1] = 0;
      inverse[r] = 0;
    }
    if (half == 0 && (thread & 3) == 0 && query < at.seq_q()) {
      float lse = LN_2 * (softmax.reference[r] + log2_approx(sum[r]) - LOG2_UNSIGNED_LEVELS);
      if constexpr (USES_MEAN) // back to the raw domain
        lse += read_row(p.q_rows, at.padded_query(), query, ROW_SHIFT);
      p.lse[at.first_row() + query] = fully_masked ? -INFINITY_F : lse;
    }
  }
  store_rows(p.out + at.first_query(p.out_stride_b, p.out_stride_s) + at.head * p.out_stride_h +
                 warp_query * p.out_stride_s + first_channel(),
             p.out_stride_s, at.seq_q() - warp_query, p.value_channels, o.x, inverse[0],
             inverse[1]);
}

__device__ __forceinline__ void consume(const Params& p, u32 shared, const QueryHead& at,
                                        int first_query) {
  const int half = common_to_warp(warp_id() / 4);
  const KeyRing ring = key_ring(shared, half);
  const ValueRing of_values = value_ring(shared);
  PairSoftmax softmax;
  Sums o;
  const int row = first_token_of_warp(threadIdx.x) + lane_id() / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + row + 8 * r;
    softmax.score_scale[r] = read_row(p.q_rows, at.padded_query(), query, ROW_SCALE);
    if constexpr (SINK_KEYS) {
      const float score = read_row(p.q_rows, at.padded_query(), query, ROW_SINK);
      softmax.reference[r] = score;
      if (half == 0 && (lane_id() & 3) == 0) // NaN of a score that is not finite
        softmax.sum[r] = UNSIGNED_LEVELS + (score - score);
    }
  }
  if constexpr (SINK_KEYS)
    start_from_sink(o, at);
  struct Rows {
    TilesDescriptor tile;
  };
  const Rows queries = {TilesDescriptor(shared + LAYOUT.queries)};
  const TilesDescriptor keys = TilesDescriptor(shared + LAYOUT.keys).at(half, LAYOUT.unit_bytes);
  const TilesDescriptor values =
      TilesDescriptor(shared + LAYOUT.values).at(half, SUM_CHANNELS * TOKEN_ROW_BYTES);
  const auto maxima_of = [&](int of_half) {
    return shared + LAYOUT.maxima + (of_half * BLOCK_Q + row) * 4;
  };
  const auto p_of = [&](int of_half) { return shared + LAYOUT.p + of_half * LAYOUT.half_p_bytes; };
  wait_for_phase(shared + LAYOUT.queries_came, 0);

  Steps step(at, tokens_from(first_query, BLOCK_Q));
  const Range unmasked = Steps::unmasked(at, tokens_from(first_query, BLOCK_Q));
  const s64 head_keys = at.padded_key() + half * GROUP_KV;
#pragma unroll 1
  for (; step.more(); step = step.next()) {
    if (step.changes_run())
      o.rescale_columns(channel_scales_of(at, step.run() - 1, CHANNEL_SCALE),
                        channel_scales_of(at, step.run(), CHANNEL_INVERSE));
    const s64 first_key = head_keys + step.first_key();
    const float2 key_scales = __ldg(reinterpret_cast<const float2*>(
        p.k8_scale + (first_key >> 7) * (128 / KEYS_A_SCALE) +
        key_scale_place(static_cast<int>(first_key & 127) + 2 * (lane_id() & 3))));
    const RingState state(step.count());
    ring.wait_until_full(state);
    Scores::Sum scores[COLUMNS8][4];
    issue_scores(scores, queries, keys.at(state.stage, 2 * LAYOUT.unit_bytes));
    finish<0>(scores);
    ring.release(state);

    float own[2], others[2], alpha[2];
    const bool hides = !step.is_in(unmasked);
    if (hides)
      softmax.find_maxima(
          own, scores, key_scales,
          HiddenKeys(at, first_query + row, step.first_key() + half * GROUP_KV, SINK_KEYS));
    else
      softmax.find_maxima(own, scores, key_scales, NoneHidden());
    if ((lane_id() & 3) == 0)
      write_float(maxima_of(half), own[0]), write_float(maxima_of(half) + 32, own[1]);
    meet_other();
    others[0] = read_float(maxima_of(1 - half)), others[1] = read_float(maxima_of(1 - half) + 32);
    if (softmax.raise(alpha, own, others))
      o.multiply_rows(alpha);
    u32 p8[2][2][4]; // of the own group, and of the other
    if (hides)
      softmax.quantize_p<true>(p8[0], scores, key_scales, own, alpha);
    else
      softmax.quantize_p<false>(p8[0], scores, key_scales, own, alpha);
    write_fragments(p_of(half), p8[0]);
    const float beta[2][2] = {{softmax.beta(0, own[0]), softmax.beta(1, own[1])},
                              {softmax.beta(0, others[0]), softmax.beta(1, others[1])}};
    meet_other();
    read_fragments(p8[1], p_of(1 - half));

    // The own group first, or the other one: both are in the ring, in the order of keys.
    constexpr int PARTS = SUM_CHANNELS / 64;
    Block blocks[2];
    const ValueRing::State of_group[2] = {ValueRing::State(2 * step.count() + half),
                                          ValueRing::State(2 * step.count() + 1 - half)};
    of_values.wait_until_full(of_group[0]);
    of_values.wait_until_full(of_group[1]);
#pragma unroll
    for (int i = 0; i <= 2 * PARTS; ++i) {
      if (i < 2 * PARTS)
        blocks[i % 2].issue<false>(
            p8[i / PARTS], values.at(of_group[i / PARTS].stage, LAYOUT.unit_bytes), i % PARTS);
      if (i > 0) {
        const int done = i - 1;
        if (i < 2 * PARTS)
          blocks[done % 2].add_to<false, 1>(o, beta[done / PARTS][0], beta[done / PARTS][1],
                                            done % PARTS);
        else
          blocks[done % 2].add_to<false, 0>(o, beta[done / PARTS][0], beta[done / PARTS][1],
                                            done % PARTS);
        if (done % PARTS == PARTS - 1)
          of_values.release(of_group[done / PARTS]);
      }
    }
    o.bias[0] = o.bias[1] = 0; // for ptxas to see that there is none
  }
  o.multiply_columns(
      channel_scales_of(at, maximum(0, step.number - 1) / STEPS_A_RUN, CHANNEL_SCALE));
  finish_rows(p, softmax, o, shared);
}

/// Stores what the block's queries of a sequence without keys get. Apart: it takes no registers of
/// loops.
__device__ __noinline__ void store_empty(const Params& p) {
  const QueryHead at = query_head(p);
  const int first = block_of_queries() * BLOCK_Q, count = minimum(BLOCK_Q, at.seq_q() - first);
  store_zeros(p.out + at.first_query(p.out_stride_b, p.out_stride_s) + at.head * p.out_stride_h +
                  first * p.out_stride_s,
              p.out_stride_s, count, p.value_channels);
  for (int i = threadIdx.x; i < count; i += THREADS)
    p.lse[at.first_row() + first + i] = -INFINITY_F;
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
          key_ring(shared, half).init();
        value_ring(shared).init();
        init_mbarrier(shared + LAYOUT.queries_came, 1);
      },
      Nothing(), [&] { produce(p, shared, at, first_query); },
      [&] { consume(p, shared, at, first_query); });
}
