//===- kernels/backward_dq_team.cuh - dQ of very wide heads ---------------------===//
//
// It computes as kernels/backward_dq.cuh does, for more than 256 channels, by a team of warps
// (tile/math/team_products.cuh). A block takes BLOCK_Q = 32 queries of one head and walks over the
// keys, a group of 64 at a time, which come in chunks:
//   P  = exp(S - lse)      warp w: 16 queries, and a quarter of the keys
//   dP = dO V^T - delta    the same
//   dS = P dP              quantised by a query's maximum, which four warps find together; in 16
//                          bits (DQ16) as it is
//   dQ += dS K             warp w: all queries, and its channels
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/dq/dq_ends.cuh"
#include "tile/math/team_products.cuh"
#include "tile/walk/tiles.cuh"

constexpr TeamDqLayout LAYOUT(SHAPE);
constexpr int SUMMED_CHUNKS = DQ16 ? ROW_CHUNKS : TURNED_CHUNKS;
constexpr int FIRST_SUMMED = SCORE_CHUNKS + ROW_CHUNKS, CHUNKS = FIRST_SUMMED + SUMMED_CHUNKS;
constexpr int ROWS = BLOCK_Q / 16;             ///< units of 16 queries
constexpr int QUARTERS = TOKENS_PER_TILE / 16; ///< units of 16 keys
static_assert(ROWS * QUARTERS == WARPS && GROUP_KV == TOKENS_PER_TILE);

constexpr int GROUPS_A_RUN = CHANNEL_TOKENS_KV / GROUP_KV; ///< whose channels share scales
using Tiles = KeyTiles<GROUP_KV, GROUPS_A_RUN>;
using Gradient = TeamSums<ROWS>;

/// Gives the vectors of scales of a scale block of keys.
__device__ __forceinline__ const float* scale_block_of(const QueryHead& at, int scale_block) {
  return at.p.kt8_scale + (at.first_key_scale_block<CHANNEL_TOKENS_KV>() + scale_block) *
                              (CHANNEL_VECTORS * HEAD_DIM);
}

/// dQ begins with the share of key 0, as in tile/dq/dq_ends.cuh.
__device__ __forceinline__ void begin_with_sink(Gradient& dq, const QueryHead& at, int first_query,
                                                int run) {
  const Params& p = at.p;
  const Element* key = p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h;
  const float* mean = p.k_mean + at.mean_row() * HEAD_DIM;
  const float* inverses = scale_block_of(at, run) + CHANNEL_INVERSE * HEAD_DIM;
  float gradient[ROWS][2];
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + row * 16 + 8 * r + (lane_id() >> 2);
      gradient[row][r] =
          sees_nothing(at, query) ? 0.0f : read_row(p.q_rows, at.padded_query(), query, ROW_SINK);
    }
  }
#pragma unroll
  for (int j = 0; j < OWN_N8; ++j) {
    const bool there = is_channel(octet_of(j), p.channels);
    float2 x = unpack<Element>(there ? *reinterpret_cast<const u32*>(key + pair_of(j)) : 0);
    if constexpr (SMOOTH_K) {
      x.x -= mean[pair_of(j)];
      x.y -= mean[pair_of(j) + 1];
    }
    if constexpr (DQ_HAS_CHANNEL_SCALES) {
      const float2 inverse = column_pair(inverses, j);
      x.x *= inverse.x, x.y *= inverse.y;
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dq.x[row][j][i] = gradient[row][i >> 1] * (i & 1 ? x.y : x.x);
    }
  }
}

/// The end. With a gradient through lse rows of dS sum to that, and the mean that K-smoothing took
/// off counts.
__device__ __forceinline__ void finish(const QueryHead& at, Gradient& dq, int first_query) {
  const Params& p = at.p;
  const float* mean = p.k_mean + at.mean_row() * HEAD_DIM;
  float factor[ROWS][2];
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[row][r] = p.softmax_scale;
      const int query = first_query + row * 16 + 8 * r + (lane_id() >> 2);
      if (!SMOOTH_K || p.dlse == nullptr || query >= at.seq_q() || sees_nothing(at, query))
        continue;
      const float gradient = p.dlse[at.first_row() + query];
#pragma unroll
      for (int j = 0; j < OWN_N8; ++j) {
        dq.x[row][j][2 * r] += gradient * mean[pair_of(j)];
        dq.x[row][j][2 * r + 1] += gradient * mean[pair_of(j) + 1];
      }
    }
  }
  dq.store(p.dq + at.first_query(p.dq_stride_b, p.dq_stride_s) + at.head * p.dq_stride_h +
               first_query * p.dq_stride_s,
           p.dq_stride_s, at.seq_q() - first_query, p.channels, factor);
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
  const Element* values =
      p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h;
  Tiles tile(at, tokens_from(first_query, BLOCK_Q));

  const ChunkRing<CHUNKS> ring = {shared + LAYOUT.ring};
  const auto load = [&](int k) {
    const Tiles of = k < CHUNKS ? tile : tile.next();
    const int chunk = k % CHUNKS;
    const u32 to = ring.slot_of(k);
    const s64 first = (head_keys + of.first_key()) * HEAD_DIM;
    if (!of.more())
      return;
    if (chunk < SCORE_CHUNKS) {
      load_swizzled<SLOT_BYTES>(to, p.k8, first + chunk * SLOT_BYTES);
    } else if (chunk < FIRST_SUMMED) {
      const int channel = (chunk - SCORE_CHUNKS) * PANEL_CHANNELS;
      load_panel<TOKENS_PER_TILE>(to, values + of.first_key() * p.v_stride_s + channel,
                                  p.v_stride_s, at.seq_kv() - of.first_key(),
                                  p.value_channels - channel);
    } else if constexpr (DQ16) {
      load_swizzled<SLOT_BYTES>(to, p.k_rows, first * 2 + (chunk - FIRST_SUMMED) * SLOT_BYTES);
    } else {
      load_swizzled<SLOT_BYTES>(to, p.kt8, first + (chunk - FIRST_SUMMED) * SLOT_BYTES);
    }
  };
  const s64 head_rows = at.padded_query() * HEAD_DIM;
  load_own_rows<BLOCK_Q, SCORE_CHUNKS>(shared + LAYOUT.queries, p.q8 + head_rows, first_query);
  if constexpr (SCALED_DOUT) {
    load_own_rows<BLOCK_Q, ROW_CHUNKS>(shared + LAYOUT.dout, p.dout_rows + head_rows, first_query);
  } else {
    const Element* dout = p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                          at.head * p.dout_stride_h + first_query * p.dout_stride_s;
#pragma unroll
    for (int panel = 0; panel < ROW_CHUNKS; ++panel)
      load_panel<BLOCK_Q>(shared + LAYOUT.dout + panel * (BLOCK_Q * PANEL_ROW),
                          dout + panel * PANEL_CHANNELS, p.dout_stride_s, at.seq_q() - first_query,
                          p.value_channels - panel * PANEL_CHANNELS);
  }
  ring.begin(load);

  const int unit = warp_id() % ROWS, quarter = warp_id() / ROWS;
  const int query = first_query + unit * 16 + (lane_id() >> 2);
  float row_scale[2], minus_lse[2], minus_delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_scale[r] = read_row(p.q_rows, at.padded_query(), query + 8 * r, ROW_SCALE);
    minus_lse[r] = -read_row(p.q_rows, at.padded_query(), query + 8 * r, ROW_SHIFT);
    minus_delta[r] = read_row(p.q_rows, at.padded_query(), query + 8 * r, ROW_MINUS_DELTA);
  }
  Gradient dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(dq, at, first_query, tile.run());

  const u32 own_rows = unit * 16 * PANEL_ROW;
  const Range unmasked = Tiles::unmasked(at, tokens_from(first_query, BLOCK_Q));
  for (; tile.more(); tile = tile.next()) {
    if (DQ_HAS_CHANNEL_SCALES && tile.changes_run())
      dq.multiply_columns(scale_block_of(at, tile.run() - 1) + CHANNEL_SCALE * HEAD_DIM,
                          scale_block_of(at, tile.run()) + CHANNEL_INVERSE * HEAD_DIM);
    const s64 own_key = head_keys + tile.first_key() + quarter * 16 + 2 * (lane_id() & 3);
    const float key_scale = __ldg(p.k8_scale + (own_key >> 7) * (128 / KEYS_A_SCALE) +
                                  key_scale_place(static_cast<int>(own_key & 127)));
    int scores[2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < SCORE_CHUNKS; ++chunk) {
      const u32 slot = ring.take(chunk, load);
      add_scores<1>(scores, shared + LAYOUT.queries + chunk * (BLOCK_Q * PANEL_ROW) + own_rows,
                    slot, quarter * 16);
    }
    float ds[2][4]; // dP - delta at first
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ds[j][i] = minus_delta[i >> 1];
    }
#pragma unroll
    for (int panel = 0; panel < ROW_CHUNKS; ++panel) {
      const u32 slot = ring.take(SCORE_CHUNKS + panel, load);
      add_values(ds, shared + LAYOUT.dout + panel * (BLOCK_Q * PANEL_ROW) + own_rows, slot,
                 quarter * 16);
    }

    float largest[2] = {0, 0};
    const auto form_ds = [&](const auto& hidden) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i >> 1;
          float x = exp2_approx(
              __fmaf_rn(static_cast<float>(scores[j][i]), row_scale[r] * key_scale, minus_lse[r]));
          if (hidden(r, j, i & 1))
            x = 0;
          ds[j][i] *= x;
          largest[r] = max_magnitude(largest[r], ds[j][i]);
        }
      }
    };
    if (tile.is_in(unmasked))
      form_ds(NoneHidden());
    else
      form_ds(HiddenKeys(at, query, tile.first_key() + quarter * 16, SINK_KEYS));

    if constexpr (DQ16) {
      write_fragment16(shared + LAYOUT.ds, unit, quarter, ds);
      TeamOperand<ROWS, 4> ds16;
#pragma unroll
      for (int panel = 0; panel < ROW_CHUNKS; ++panel) {
        const u32 slot = ring.take(FIRST_SUMMED + panel, load); // the first one's barrier is dS's
        if (panel == 0)
          ds16.read(shared + LAYOUT.ds);
        dq.add(ds16, slot, panel);
      }
    } else {
      const u32 maxima = shared + LAYOUT.maxima + (lane_id() >> 2) * 16;
      quad_max_nan(largest);
      if ((lane_id() & 3) == 0) {
        write_float(maxima + (unit * 16) * 16 + quarter * 4, largest[0]);
        write_float(maxima + (unit * 16 + 8) * 16 + quarter * 4, largest[1]);
      }
      __syncthreads();
      const auto scale_of = [&](int row, int r) {
        const float4 of = read_float4(maxima + (row * 16 + 8 * r) * 16);
        return fast_scale<SIGNED_LEVELS>(max_nan(max_nan(of.x, of.y), max_nan(of.z, of.w)));
      };
      write_half_fragment<true>(shared + LAYOUT.ds, unit, quarter, ds, scale_of(unit, 0).inverse,
                                scale_of(unit, 1).inverse);
      float factor[ROWS][2];
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          factor[row][r] = scale_of(row, r).value;
      }
      TeamOperand<ROWS, 2> ds8;
#pragma unroll
      for (int chunk = 0; chunk < TURNED_CHUNKS; ++chunk) {
        const u32 slot = ring.take(FIRST_SUMMED + chunk, load); // the first one's barrier is dS's
        if (chunk == 0)
          ds8.read(shared + LAYOUT.ds);
        dq.template add<true>(ds8, slot, chunk, factor);
      }
    }
  }
  cp_async_wait<0>();
  if constexpr (DQ_HAS_CHANNEL_SCALES)
    dq.multiply_columns(scale_block_of(at, maximum(0, tile.number - 1) / GROUPS_A_RUN) +
                        CHANNEL_SCALE * HEAD_DIM);
  finish(at, dq, first_query);
}
