//===- kernels/backward_dkv_team.cuh - dK and dV of very wide heads -------------===//
//
// It computes as kernels/backward_dkv.cuh does, for more than 256 channels, by a team of warps
// (tile/math/team_products.cuh). A block takes BLOCK_KV = 32 keys of one key/value head and walks
// over the queries of every head of its group, 64 at a time, which come in chunks:
//   P^T  = exp(S^T - lse)     warp w: 16 keys, and a quarter of the queries
//   dP^T = V dO^T - delta     the same
//   dV  += P^T dO             warp w: all keys, and its channels; unsigned x signed INT8, or 16
//   bits dK  += dS^T Q             (DV16, DK16)
// P and dS are quantised by a key's maxima over 64 queries, which four warps find together.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/math/key_gradients.cuh"
#include "tile/math/team_products.cuh"
#include "tile/walk/tiles.cuh"

constexpr TeamDkvLayout LAYOUT(SHAPE);
constexpr int DV_CHUNKS = DV16 ? ROW_CHUNKS : TURNED_CHUNKS;
constexpr int DK_CHUNKS = DK16 ? ROW_CHUNKS : TURNED_CHUNKS;
constexpr int FIRST_OF_DV = SCORE_CHUNKS + ROW_CHUNKS, FIRST_OF_DK = FIRST_OF_DV + DV_CHUNKS;
constexpr int CHUNKS = FIRST_OF_DK + DK_CHUNKS;
constexpr int ROWS = BLOCK_KV / 16;            ///< units of 16 keys
constexpr int QUARTERS = TOKENS_PER_TILE / 16; ///< units of 16 queries
static_assert(ROWS * QUARTERS == WARPS && GROUP_Q == TOKENS_PER_TILE);
static_assert(SCALED_DOUT != DV16, "dV in 16 bits takes dO as it is");

using Gradient = TeamSums<ROWS>;

/// Starts copies of chunks of a tile of queries, and of their vectors, which come with the first.
struct Loads {
  const Params& p;
  const KeyHead& at;
  const QueryTiles& walk;
  u32 shared;
  const ChunkRing<CHUNKS>& ring;

  __device__ __forceinline__ void operator()(int chunk, const QueryTile& tile, int buffer) const {
    if (!walk.has(tile))
      return;
    const u32 to = ring.slot_of(chunk);
    if (chunk < SCORE_CHUNKS) {
      load_swizzled<SLOT_BYTES>(to, p.q8, tile.elements() + chunk * SLOT_BYTES);
      if (chunk == 0)
        load_floats<ROW_VECTORS * TOKENS_PER_TILE, THREADS>(
            shared + LAYOUT.rows + buffer * LAYOUT.rows_bytes, p.q_rows + tile.rows());
    } else if (chunk < FIRST_OF_DV) {
      if constexpr (SCALED_DOUT)
        load_swizzled<SLOT_BYTES>(to, p.dout_rows,
                                  tile.elements() * 2 + (chunk - SCORE_CHUNKS) * SLOT_BYTES);
      else
        panel_of_dout(to, tile, chunk - SCORE_CHUNKS);
    } else if (chunk < FIRST_OF_DK) {
      if constexpr (DV16)
        panel_of_dout(to, tile, chunk - FIRST_OF_DV);
      else
        load_swizzled<SLOT_BYTES>(to, p.dot8, tile.elements() + (chunk - FIRST_OF_DV) * SLOT_BYTES);
    } else if constexpr (DK16) {
      panel(to, p.q + at.first_query(p.q_stride_b, p.q_stride_s) + tile.head * p.q_stride_h,
            p.q_stride_s, tile, chunk - FIRST_OF_DK, p.channels);
    } else {
      load_swizzled<SLOT_BYTES>(to, p.qt8, tile.elements() + (chunk - FIRST_OF_DK) * SLOT_BYTES);
    }
  }

private:
  __device__ __forceinline__ void panel(u32 to, const Element* head, s64 stride,
                                        const QueryTile& tile, int number, int channels) const {
    const int channel = number * PANEL_CHANNELS;
    load_panel<TOKENS_PER_TILE>(to, head + tile.first_query() * stride + channel, stride,
                                at.seq_q() - tile.first_query(), channels - channel);
  }
  __device__ __forceinline__ void panel_of_dout(u32 to, const QueryTile& tile, int number) const {
    panel(to,
          p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) + tile.head * p.dout_stride_h,
          p.dout_stride_s, tile, number, p.value_channels);
  }
};

/// Gives the vectors of scales of a tile's scale block, of Q's copy or of dO's.
__device__ __forceinline__ const float* scales_of(const float* scales, const KeyHead& at,
                                                  const QueryTile& tile) {
  return scales + (at.first_scale_block<CHANNEL_TOKENS_Q>(tile.head) + tile.run()) *
                      (CHANNEL_VECTORS * HEAD_DIM);
}
/// Rescales the sums from the scales of a tile's run to those of another one's, or, where there is
/// none, multiplies them by their scales.
__device__ __forceinline__ void rescale(const Params& p, const KeyHead& at, Gradient& dk,
                                        Gradient& dv, const QueryTile& from, const QueryTile* to) {
  constexpr int INVERSE = CHANNEL_INVERSE * HEAD_DIM;
  if constexpr (!DK16)
    dk.multiply_columns(scales_of(p.qt8_scale, at, from) + CHANNEL_SCALE * HEAD_DIM,
                        to ? scales_of(p.qt8_scale, at, *to) + INVERSE : nullptr);
  if constexpr (!DV16)
    dv.multiply_columns(scales_of(p.dot8_scale, at, from) + CHANNEL_SCALE * HEAD_DIM,
                        to ? scales_of(p.dot8_scale, at, *to) + INVERSE : nullptr);
}

/// Adds to sums the product of an operand that is at `fragments` behind the barrier of the first
/// chunk, and of the chunks from FIRST on.
template <bool SIGNED, bool IN_16, int FIRST, int COUNT, typename Load>
__device__ __forceinline__ void add_product(Gradient& sums, u32 fragments,
                                            const float (&factor)[ROWS][2],
                                            const ChunkRing<CHUNKS>& ring, const Load& load) {
  TeamOperand<ROWS, IN_16 ? 4 : 2> operand;
#pragma unroll
  for (int chunk = 0; chunk < COUNT; ++chunk) {
    const u32 slot = ring.take(FIRST + chunk, load);
    if (chunk == 0)
      operand.read(fragments);
    if constexpr (IN_16)
      sums.add(operand, slot, chunk);
    else
      sums.template add<SIGNED>(operand, slot, chunk, factor);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  begin_in_stream_order();
  if (!enter_keys<BLOCK_KV>(p))
    return;
  const KeyHead at = key_head(p);
  const int first_key = block_of_keys(p) * BLOCK_KV;
  const QueryTiles walk(at, tokens_from(first_key, BLOCK_KV));
  QueryTile tile = walk.start(at);
  int buffer = 0; // of this tile's vectors

  const ChunkRing<CHUNKS> ring = {shared + LAYOUT.ring};
  const Loads loads = {p, at, walk, shared, ring};
  const auto load = [&](int k) {
    if (k < CHUNKS)
      loads(k, tile, buffer);
    else
      loads(k - CHUNKS, walk.next(tile), buffer ^ 1);
  };
  load_own_rows<BLOCK_KV, SCORE_CHUNKS>(shared + LAYOUT.keys, p.k8 + at.padded_key() * HEAD_DIM,
                                        first_key);
  const Element* values = p.v + at.first_key(p.v_stride_b, p.v_stride_s) +
                          at.kv_head * p.v_stride_h + first_key * p.v_stride_s;
#pragma unroll
  for (int panel = 0; panel < ROW_CHUNKS; ++panel)
    load_panel<BLOCK_KV>(shared + LAYOUT.values + panel * (BLOCK_KV * PANEL_ROW),
                         values + panel * PANEL_CHANNELS, p.v_stride_s, at.seq_kv() - first_key,
                         p.value_channels - panel * PANEL_CHANNELS);
  ring.begin(load);

  const int unit = warp_id() % ROWS, quarter = warp_id() / ROWS;
  const int warp_key = first_key + unit * 16;
  const int key[2] = {warp_key + (lane_id() >> 2), warp_key + (lane_id() >> 2) + 8};
  // One for both rows (KEYS_A_SCALE).
  const float key_scale = p.k8_scale[at.padded_key() / KEYS_A_SCALE + key_scale_place(key[0])];
  const u32 own_rows = unit * 16 * PANEL_ROW;
  Gradient dk, dv;
  bool begun = false;
  QueryTile last = tile;
  while (walk.has(tile)) {
    if (begun && walk.begins_run(tile))
      rescale(p, at, dk, dv, last, &tile);
    const u32 rows = shared + LAYOUT.rows + buffer * LAYOUT.rows_bytes;
    int scores[2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < SCORE_CHUNKS; ++chunk) {
      const u32 slot = ring.take(chunk, load);
      add_scores<1>(scores, shared + LAYOUT.keys + chunk * (BLOCK_KV * PANEL_ROW) + own_rows, slot,
                    quarter * 16);
    }
    const float4 scales = read_columns(rows + ROW_SCALE * TOKENS_PER_TILE * 4, quarter);
    const float4 lses = read_columns(rows + ROW_SHIFT * TOKENS_PER_TILE * 4, quarter);
    const float4 deltas = read_columns(rows + ROW_MINUS_DELTA * TOKENS_PER_TILE * 4, quarter);
    const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
    const float lse[4] = {lses.x, lses.y, lses.z, lses.w};
    const float minus_delta[4] = {deltas.x, deltas.y, deltas.z, deltas.w};
    float x[2][4], ds[2][4]; // P, and dP - delta at first
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 2 * j + (i & 1);
        x[j][i] = exp2_approx(
            __fmaf_rn(static_cast<float>(scores[j][i]), key_scale * scale[column], -lse[column]));
        ds[j][i] = minus_delta[column];
      }
    }
    const int own_query = tile.first_query() + quarter * 16;
    if (HIDES_SCORES &&
        any_hidden(at, tile.head, tokens_from(own_query, 16), tokens_from(warp_key, 16))) {
      const auto key_of = [&](int r) { return key[r]; };
      mask(x, QueriesHiddenFrom(at, tile.head, key_of, own_query), 0.0f);
    }
#pragma unroll
    for (int panel = 0; panel < ROW_CHUNKS; ++panel) {
      const u32 slot = ring.take(SCORE_CHUNKS + panel, load);
      add_values(ds, shared + LAYOUT.values + panel * (BLOCK_KV * PANEL_ROW) + own_rows, slot,
                 quarter * 16);
    }
    float largest_p[2] = {0, 0}, largest_ds[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ds[j][i] *= x[j][i];
        largest_p[i >> 1] = max_nan(largest_p[i >> 1], x[j][i]);
        largest_ds[i >> 1] = max_magnitude(largest_ds[i >> 1], ds[j][i]);
      }
    }

    const u32 maxima = shared + LAYOUT.maxima + (lane_id() >> 2) * 16;
    constexpr int OF_DS = 4 * BLOCK_KV * 4; // behind those of P
    if constexpr (!DV16 || !DK16) {
      quad_max_nan(largest_p);
      quad_max_nan(largest_ds);
      if ((lane_id() & 3) == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const u32 to = maxima + (unit * 16 + 8 * r) * 16 + quarter * 4;
          write_float(to, largest_p[r]);
          write_float(to + OF_DS, largest_ds[r]);
        }
      }
      __syncthreads();
    }
    const auto largest_of = [&](int row, int r, int offset) {
      const float4 of = read_float4(maxima + offset + (row * 16 + 8 * r) * 16);
      return max_nan(max_nan(of.x, of.y), max_nan(of.z, of.w));
    };
    const auto p_scale = [&](int row, int r) {
      return fast_scale<UNSIGNED_LEVELS>(largest_of(row, r, 0));
    };
    const auto ds_scale = [&](int row, int r) {
      return fast_scale<SIGNED_LEVELS>(largest_of(row, r, OF_DS));
    };
    if constexpr (DV16)
      write_fragment16(shared + LAYOUT.p, unit, quarter, x);
    else
      write_half_fragment<false>(shared + LAYOUT.p, unit, quarter, x, p_scale(unit, 0).inverse,
                                 p_scale(unit, 1).inverse);
    if constexpr (DK16)
      write_fragment16(shared + LAYOUT.ds, unit, quarter, ds);
    else
      write_half_fragment<true>(shared + LAYOUT.ds, unit, quarter, ds, ds_scale(unit, 0).inverse,
                                ds_scale(unit, 1).inverse);
    float p_factor[ROWS][2], ds_factor[ROWS][2];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p_factor[row][r] = DV16 ? 1 : p_scale(row, r).value;
        ds_factor[row][r] = DK16 ? 1 : ds_scale(row, r).value;
      }
    }
    add_product<false, DV16, FIRST_OF_DV, DV_CHUNKS>(dv, shared + LAYOUT.p, p_factor, ring, load);
    add_product<true, DK16, FIRST_OF_DK, DK_CHUNKS>(dk, shared + LAYOUT.ds, ds_factor, ring, load);
    begun = true;
    last = tile;
    tile = walk.next(tile);
    buffer ^= 1;
  }
  cp_async_wait<0>();
  if (begun) // else there are no scales
    rescale(p, at, dk, dv, last, nullptr);

  const KeyGradients stored = {
      p.dk + at.first_key(p.dk_stride_b, p.dk_stride_s) + at.kv_head * p.dk_stride_h,
      p.dv + at.first_key(p.dv_stride_b, p.dv_stride_s) + at.kv_head * p.dv_stride_h};
  float scale[ROWS][2], one[ROWS][2];
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    scale[row][0] = scale[row][1] = p.softmax_scale;
    one[row][0] = one[row][1] = 1;
  }
  dk.store(stored.dk + first_key * p.dk_stride_s, p.dk_stride_s, at.seq_kv() - first_key,
           p.channels, scale);
  dv.store(stored.dv + first_key * p.dv_stride_s, p.dv_stride_s, at.seq_kv() - first_key,
           p.value_channels, one);
  if constexpr (SINK_KEYS > 0) {
    if (first_key == 0) {
      __syncthreads();
      write_first_key<THREADS>(at, stored);
    }
  }
}
