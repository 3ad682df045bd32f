//===- kernels/forward_team.cuh - O and lse of very wide heads ------------------===//
//
// It computes as kernels/forward.cuh does, for more than 256 channels, by a team of warps
// (tile/math/team_products.cuh). A block takes BLOCK_Q = 64 queries of one head and walks over the
// keys, a group of 64 at a time, whose K and V come in chunks:
//   S = Q K^T        warp w: 16 queries, and half of the keys
//   P                relative to a query's maximum over the group, which two warps find together
//   O = O + beta P V warp w: all queries, and its channels
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/math/team_softmax.cuh"
#include "tile/walk/tiles.cuh"

constexpr TeamForwardLayout LAYOUT(SHAPE);
constexpr int CHUNKS = SCORE_CHUNKS + TURNED_CHUNKS;
constexpr int ROWS = BLOCK_Q / 16; ///< units of 16 queries
/// Of which P is kept in registers: Blackwell's schedules have none for all.
constexpr int HELD_ROWS = __CUDA_ARCH__ == 1030 ? 1 : __CUDA_ARCH__ >= 1000 ? ROWS / 2 : ROWS;
static_assert(2 * ROWS == WARPS && GROUP_KV == TOKENS_PER_TILE);

constexpr int GROUPS_A_RUN = CHANNEL_TOKENS_KV / GROUP_KV; ///< whose channels share scales
using Tiles = KeyTiles<GROUP_KV, GROUPS_A_RUN>;
using Output = TeamSums<ROWS>;

/// Gives the scales of V's transposed copy, of a scale block of the head's keys.
__device__ __forceinline__ const float* channel_scales_of(const QueryHead& at, int scale_block) {
  return at.p.vt8_scale + (at.first_key_scale_block<CHANNEL_TOKENS_KV>() + scale_block) *
                              (CHANNEL_VECTORS * HEAD_DIM);
}

/// O starts from V_0 over the scales of its channels, times P's 255, where key 0 is separate.
__device__ __forceinline__ void start_from_sink(Output& o, const QueryHead& at, int first_run) {
  const Params& p = at.p;
  const Element* value = p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h;
  const float* inverse = channel_scales_of(at, first_run) + CHANNEL_INVERSE * HEAD_DIM;
#pragma unroll
  for (int j = 0; j < OWN_N8; ++j) {
    const bool there = is_channel(octet_of(j), p.value_channels);
    const float2 v = unpack<Element>(there ? *reinterpret_cast<const u32*>(value + pair_of(j)) : 0);
    const float2 levels = column_pair(inverse, j);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float(&x)[4] = o.x[row][j];
      x[0] = x[2] = v.x * levels.x * UNSIGNED_LEVELS;
      x[1] = x[3] = v.y * levels.y * UNSIGNED_LEVELS;
    }
  }
}

/// Reads two numbers for each of a thread's rows, of which pairs lie at `factors`.
__device__ __forceinline__ void read_factors(u32 factors, float (&a)[ROWS][2],
                                             float (&b)[ROWS][2]) {
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 both = read_float2(factors + (row * 16 + 8 * r + (lane_id() >> 2)) * 8);
      a[row][r] = both.x, b[row][r] = both.y;
    }
  }
}

/// The end: lse, and O over its rows' sums.
__device__ __forceinline__ void finish(const QueryHead& at, TeamSoftmax& softmax, Output& o,
                                       u32 shared, int first_query) {
  const Params& p = at.p;
  __syncthreads(); // factors have been read
  softmax.exchange_sums(shared + LAYOUT.maxima);
  const int own = first_query + softmax.first_row();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = own + 8 * r + (lane_id() >> 2);
    const float sum = softmax.whole_sum(shared + LAYOUT.maxima, r);
    const bool fully_masked = sees_nothing(at, query);
    if (softmax.is_first_half() && (lane_id() & 3) == 0) {
      const float inverse = fully_masked ? 0.0f : __fdiv_rn(1.0f, sum);
      const float whole[2] = {inverse, fully_masked ? 0.0f : 1.0f};
      write_float2(shared + LAYOUT.factors + (query - first_query) * 8, whole);
      if (query < at.seq_q()) {
        float lse = LN_2 * (softmax.reference[r] + log2_approx(sum) - LOG2_UNSIGNED_LEVELS);
        if constexpr (USES_MEAN) // back to the raw domain
          lse += read_row(p.q_rows, at.padded_query(), query, ROW_SHIFT);
        p.lse[at.first_row() + query] = fully_masked ? -INFINITY_F : lse;
      }
    }
  }
  __syncthreads();
  float inverse[ROWS][2], sees[ROWS][2];
  read_factors(shared + LAYOUT.factors, inverse, sees);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
#pragma unroll
    for (int j = 0; j < OWN_N8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) // what is not finite stays so, but not of a query without keys
        if (sees[row][i >> 1] == 0)
          o.x[row][j][i] = 0;
    }
  }
  o.store(p.out + at.first_query(p.out_stride_b, p.out_stride_s) + at.head * p.out_stride_h +
              first_query * p.out_stride_s,
          p.out_stride_s, at.seq_q() - first_query, p.value_channels, inverse);
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
  begin_in_stream_order();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const int first_query = block_of_queries() * BLOCK_Q;
  const QueryHead at = query_head(p);
  const s64 head_keys = at.padded_key();
  Tiles tile(at, tokens_from(first_query, BLOCK_Q));

  const ChunkRing<CHUNKS> ring = {shared + LAYOUT.ring};
  const auto load = [&](int k) {
    const Tiles of = k < CHUNKS ? tile : tile.next();
    const s64 first = (head_keys + of.first_key()) * HEAD_DIM;
    if (!of.more())
      return;
    if (const int chunk = k % CHUNKS; chunk < SCORE_CHUNKS)
      load_swizzled<SLOT_BYTES>(ring.slot_of(k), p.k8, first + chunk * SLOT_BYTES);
    else
      load_swizzled<SLOT_BYTES>(ring.slot_of(k), p.vt8,
                                first + (chunk - SCORE_CHUNKS) * SLOT_BYTES);
  };
  load_own_rows<BLOCK_Q, SCORE_CHUNKS>(shared + LAYOUT.queries, p.q8 + at.padded_query() * HEAD_DIM,
                                       first_query);
  ring.begin(load);

  TeamSoftmax softmax(p, at, first_query);
  Output o;
  if constexpr (SINK_KEYS)
    start_from_sink(o, at, tile.run());
  const Range unmasked = Tiles::unmasked(at, tokens_from(first_query, BLOCK_Q));
  for (; tile.more(); tile = tile.next()) {
    if (tile.changes_run())
      o.multiply_columns(channel_scales_of(at, tile.run() - 1) + CHANNEL_SCALE * HEAD_DIM,
                         channel_scales_of(at, tile.run()) + CHANNEL_INVERSE * HEAD_DIM);
    softmax.read_key_scale(p, head_keys + tile.first_key());
    int scores[TeamSoftmax::N8][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < SCORE_CHUNKS; ++chunk) {
      const u32 slot = ring.take(chunk, load);
      add_scores<TeamSoftmax::N8 / 2>(
          scores, shared + LAYOUT.queries + (chunk * BLOCK_Q + softmax.first_row()) * PANEL_ROW,
          slot, softmax.first_column());
    }
    if (tile.is_in(unmasked)) {
      softmax.form_p(scores, NoneHidden(), shared + LAYOUT.maxima, shared + LAYOUT.factors,
                     shared + LAYOUT.p);
    } else {
      const int query = first_query + softmax.first_row() + (lane_id() >> 2);
      const HiddenKeys hidden(at, query, tile.first_key() + softmax.first_column(), SINK_KEYS);
      softmax.form_p(scores, hidden, shared + LAYOUT.maxima, shared + LAYOUT.factors,
                     shared + LAYOUT.p);
    }
    float alpha[ROWS][2], beta[ROWS][2];
    TeamOperand<ROWS, 2, HELD_ROWS> p8;
#pragma unroll
    for (int chunk = 0; chunk < TURNED_CHUNKS; ++chunk) {
      const u32 slot = ring.take(SCORE_CHUNKS + chunk, load); // the first one's barrier is P's, too
      if (chunk == 0) {
        read_factors(shared + LAYOUT.factors, alpha, beta);
        bool moves = false;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          moves = moves || alpha[row][0] != 1 || alpha[row][1] != 1;
        if (__any_sync(~0u, moves))
          o.multiply_rows(alpha);
        p8.read(shared + LAYOUT.p);
      }
      o.template add<false>(p8, slot, chunk, beta);
    }
  }
  cp_async_wait<0>();
  o.multiply_columns(channel_scales_of(at, maximum(0, tile.number - 1) / GROUPS_A_RUN) +
                     CHANNEL_SCALE * HEAD_DIM);
  finish(at, softmax, o, shared, first_query);
}
