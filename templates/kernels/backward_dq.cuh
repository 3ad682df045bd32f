//===- kernels/backward_dq.cuh - dQ ---------------------------------------------===//
//
// SageBwd, Algorithm 2, the half that sums over keys. One block takes BLOCK_Q queries of one head,
// 16 a warp, and walks over the keys a group at a time, within it 64 keys at a time:
//   P  = exp(S - lse)      S as in the forward pass
//   dP = dO V^T - delta    16-bit; delta is where the accumulator starts
//   dS = P dP              quantised: a scale a query and group (`row`), or one a block of
//                          GROUP_Q x GROUP_KV (`block`), which backward_dkv then reads
//   dQ += dS K             INT8, or (DQ16) in 16 bits with the smoothed keys, 64 at a time
//
// With STAGES = 2 shared memory holds the next 64 keys and values while these are worked on. With
// STAGES = 1 there is one copy, whose halves are refilled in turn: values while S is formed, the
// next keys during dP.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/mean_scores.cuh"
#include "tile/quantizer.cuh"
#include "tile/query_gradients.cuh"

constexpr int GROUP = DQ16 ? TOKENS_PER_TILE : GROUP_KV;
constexpr int KEY_TILES = GROUP / TOKENS_PER_TILE;
/// The keys that dS meets come a group at a time: with the group's only tile, or beside its first.
constexpr bool PREFETCHES_SUMMED = STAGES == 2 && KEY_TILES == 1;
constexpr int GROUPS_A_UNIT = CHANNEL_TOKENS_KV / GROUP; ///< whose channels share scales
constexpr int GROUPS_UNTIL_SETTLED = 8;                  ///< where there are no units
/// Whether rows of Q or dO are held in registers: they lie where keys and values come later.
constexpr bool HOLDS_ROWS = SCORE_ROWS_IN_REGISTERS || VALUE_ROWS_IN_REGISTERS;

struct SharedLayout {
  static constexpr int QUERIES_BYTES = BLOCK_Q * SCORE_ROW_BYTES;
  static constexpr int DOUT_BYTES = BLOCK_Q * VALUE_ROW_BYTES;
  static constexpr int KEYS =
      (SCORE_ROWS_IN_REGISTERS ? 0 : QUERIES_BYTES) + (VALUE_ROWS_IN_REGISTERS ? 0 : DOUT_BYTES);
  static constexpr int QUERIES = SCORE_ROWS_IN_REGISTERS ? KEYS : 0;
  static constexpr int DOUT =
      SCORE_ROWS_IN_REGISTERS ? (VALUE_ROWS_IN_REGISTERS ? QUERIES_BYTES : 0) : QUERIES_BYTES;
  static constexpr int ROWS_END = QUERIES_BYTES + DOUT_BYTES;
  static constexpr int KEYS_BYTES = TOKENS_PER_TILE * SCORE_ROW_BYTES;
  static constexpr int VALUES = KEYS + STAGES * KEYS_BYTES;
  static constexpr int VALUES_BYTES = TOKENS_PER_TILE * VALUE_ROW_BYTES;
  static constexpr int SUMMED = VALUES + STAGES * VALUES_BYTES; ///< keys that dS meets
  static constexpr int SUMMED_BYTES = GROUP * (DQ16 ? SUM_ROW_BYTES : SUM_CHANNELS);
  static constexpr int KEY_SCALES = SUMMED + (PREFETCHES_SUMMED ? 2 : 1) * SUMMED_BYTES;
  static constexpr int KEY_SCALES_BYTES = 128 / KEYS_A_SCALE * 4; ///< those of 128 keys
  static constexpr int MAXIMA = KEY_SCALES + (QK16 ? 0 : STAGES * KEY_SCALES_BYTES);
  static constexpr int END = MAXIMA + (BLOCK_SCALES && !DQ16 ? 2 * WARPS * 8 : 0);
  static constexpr int TOTAL = END < ROWS_END ? ROWS_END : END;
};
static_assert(SHARED_BYTES == 0 || SharedLayout::TOTAL == SHARED_BYTES,
              "the host launches with what is used here");
static_assert(!BLOCK_SCALES || BLOCK_Q == GROUP_Q, "one scale serves the whole block");

/// Whether a group needs a mask: known while compiling, or not.
template <bool VALUE> struct Always { static constexpr bool value = VALUE; };
struct Sometimes {
  bool value;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(shared_memory));
  begin_in_stream_order();
  if (!enter_queries<BLOCK_Q>(p, store_without_keys))
    return;
  const int lane = lane_id(), row_in_warp = lane >> 2, quad_lane = lane & 3;

  const int block = block_of_queries(), first_query = block * BLOCK_Q;
  const QueryHead at = query_head(p);

  // What is copied while keys are walked over: 64 of them by their number, or a group by its own.
  // `valid` tokens of the sequence are left from there on.
  const Element* key_tensor =
      p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h;
  const Element* value_tensor =
      p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h;
  const s8* keys8 = p.k8 + at.padded_key() * HEAD_DIM;
  const s8* keys_t = p.kt8 + at.padded_key() * HEAD_DIM;
  const Element* rows16 = p.k_rows + at.padded_key() * HEAD_DIM;
  const float* key_scales = p.k8_scale + at.padded_key() / KEYS_A_SCALE;
  const auto load_keys = [&](int tile, int stage, int valid) {
    const u32 destination = shared + SharedLayout::KEYS + stage * SharedLayout::KEYS_BYTES;
    if constexpr (QK16) {
      load_tile<TOKENS_PER_TILE, SCORE_ROW_BYTES, THREADS>(
          destination, key_tensor + static_cast<s64>(tile * TOKENS_PER_TILE) * p.k_stride_s,
          p.k_stride_s * 2, valid, p.channels);
    } else {
      load_image<SharedLayout::KEYS_BYTES>(destination, keys8 + static_cast<s64>(tile) *
                                                                    (TOKENS_PER_TILE * HEAD_DIM));
      load_floats<SharedLayout::KEY_SCALES_BYTES / 4, THREADS>(
          shared + SharedLayout::KEY_SCALES + stage * SharedLayout::KEY_SCALES_BYTES,
          key_scales + (tile >> 1) * (SharedLayout::KEY_SCALES_BYTES / 4));
    }
  };
  Copier<VALUE_ROW_BYTES, THREADS> copy_values;
  if constexpr (HOLDS_COPIER)
    copy_values.hold();
  const auto load_values = [&](int tile, int stage, int valid) {
    load_tile<TOKENS_PER_TILE, VALUE_ROW_BYTES, THREADS>(
        shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES,
        value_tensor + static_cast<s64>(tile * TOKENS_PER_TILE) * p.v_stride_s, p.v_stride_s * 2,
        valid, p.value_channels, copy_values);
  };
  const auto load_summed = [&](int group, int stage, int valid) {
    const u32 destination = shared + SharedLayout::SUMMED + stage * SharedLayout::SUMMED_BYTES;
    // A tile of 64 keys holds channel after channel, or 64 channels after 64.
    constexpr int IMAGES = CHANNEL_PARTS == 1 ? 1 : KEY_TILES, ELEMENT = DQ16 ? 2 : 1;
    constexpr int BYTES = SharedLayout::SUMMED_BYTES / IMAGES;
#pragma unroll
    for (int image = 0; image < IMAGES; ++image)
      load_image<BYTES>(
          destination + image * BYTES, DQ16 ? static_cast<const void*>(rows16) : keys_t,
          static_cast<s64>(group * IMAGES + image) * (GROUP / IMAGES * HEAD_DIM * ELEMENT) +
              first_channel() * (TOKENS_PER_TILE * ELEMENT));
  };

  // Scales of a group's unit and inverses of another's, brought where values have been read: sums
  // change their units once in CHANNEL_TOKENS_KV keys.
  const auto load_scales = [&](int stage, int group, int next) {
    const u32 destination = shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES;
    const QueryHead here = query_head_anew(p);
    __syncthreads();
    load_floats<SUM_CHANNELS, THREADS>(destination, unit_of(here, group / GROUPS_A_UNIT) +
                                                        CHANNEL_SCALE * HEAD_DIM);
    load_floats<SUM_CHANNELS, THREADS>(destination + SUM_CHANNELS * 4,
                                       unit_of(here, next / GROUPS_A_UNIT) +
                                           CHANNEL_INVERSE * HEAD_DIM);
    cp_async_commit();
    wait_for_tiles();
    return destination;
  };

  KeyTilesMaskedFirst<GROUP> walk(at, tokens_from(first_query, BLOCK_Q));

  load_score_rows<BLOCK_Q>(shared + SharedLayout::QUERIES,
                           p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
                           p.q + at.first_query(p.q_stride_b, p.q_stride_s) +
                               at.head * p.q_stride_h + first_query * p.q_stride_s,
                           p.q_stride_s, at.seq_q() - first_query, p.channels);
  load_dout_rows<BLOCK_Q>(shared + SharedLayout::DOUT,
                          p.dout_rows + (at.padded_query() + first_query) * HEAD_DIM,
                          p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                              at.head * p.dout_stride_h + first_query * p.dout_stride_s,
                          p.dout_stride_s, at.seq_q() - first_query, p.value_channels);
  cp_async_commit();

  const int warp_query = first_query + warp_id() * 16;
  const int query[2] = {warp_query + row_in_warp, warp_query + row_in_warp + 8};
  ScoreRow row[2];
  float minus_delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const s64 first_row = at.padded_query();
    row[r] = {QK16 ? p.softmax_scale * LOG2_E : read_row(p.q_rows, first_row, query[r], ROW_SCALE),
              -read_row(p.q_rows, first_row, query[r], ROW_SHIFT)};
    minus_delta[r] = read_row(p.q_rows, first_row, query[r], ROW_MINUS_DELTA);
  }
  const auto start = [&](int) {
    return Quad{minus_delta[0], minus_delta[0], minus_delta[1], minus_delta[1]};
  };

  ScoreRows queries;
  ValueRows dout;
  const auto take_rows = [&] {
    queries.load(shared + SharedLayout::QUERIES, warp_id() * 16);
    dout.load(shared + SharedLayout::DOUT, warp_id() * 16);
  };
  if constexpr (HOLDS_ROWS) {
    wait_for_tiles();
    take_rows();
    __syncthreads();
  }
  if (walk.left() > 0) {
    const int valid = at.seq_kv() - walk.number() * GROUP;
    load_keys(walk.number() * KEY_TILES, 0, valid);
    if constexpr (STAGES == 2)
      load_values(walk.number() * KEY_TILES, 0, valid);
    if constexpr (PREFETCHES_SUMMED)
      load_summed(walk.number(), 0, valid);
  }
  cp_async_commit();
  if constexpr (!HOLDS_ROWS) {
    wait_for_tiles();
    take_rows();
  }
  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, query,
                    unit_of(at, walk.number() / GROUPS_A_UNIT) + CHANNEL_INVERSE * HEAD_DIM);

  // Under `block` the warps put their maxima side by side; after a barrier each takes the largest.
  const auto put_maxima = [&](u32 maxima, float(&ds)[2], float& p_max) {
    ds[0] = warp_max_nan(max_nan(ds[0], ds[1]));
    p_max = warp_max_nan(p_max);
    if (lane == 0) {
      write_float(maxima + warp_id() * 8, ds[0]);
      write_float(maxima + warp_id() * 8 + 4, p_max);
    }
  };
  const auto take_maxima = [&](u32 maxima, int group, float(&ds)[2], float& p_max) {
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float2 other = read_float2(maxima + warp * 8);
      ds[0] = max_nan(ds[0], other.x);
      p_max = max_nan(p_max, other.y);
    }
    ds[1] = ds[0];
    if (threadIdx.x == 0) {
      const s64 tile = (at.first_group<GROUP_Q>() + block) * at.key_groups<GROUP_KV>();
      p.tile_ds_max[tile + group] = ds[0];
      p.tile_p_max[tile + group] = p_max;
    }
  };

  const auto take_group = [&](auto masked) {
    const int group = walk.number(), next_group = walk.next(), count = walk.count();
    const bool more = walk.left() > 1;
    const auto stage_of = [&](int tile) {
      return STAGES == 1 ? 0 : KEY_TILES == 2 ? tile : count & 1;
    };
    const int summed_stage = PREFETCHES_SUMMED ? count & 1 : 0;
    // Behind a group without a mask come full ones alone.
    const auto valid_in = [&](int tile) {
      return masked.value ? at.seq_kv() - tile * TOKENS_PER_TILE : TOKENS_PER_TILE;
    };

    float ds[KEY_TILES][COLUMNS8][4]; // dP - delta at first
    float largest_ds[2] = {0, 0}, largest_p = 0, group_scale = 1;
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
      const int stage = stage_of(tile);
      const int key_tile = group * KEY_TILES + tile;
      const bool last = tile == KEY_TILES - 1;
      const int next_tile = last ? next_group * KEY_TILES : key_tile + 1;

      wait_for_tiles();
      if constexpr (STAGES == 2) {
        if (!last || more) {
          load_keys(next_tile, stage ^ 1, valid_in(next_tile));
          load_values(next_tile, stage ^ 1, valid_in(next_tile));
          if constexpr (PREFETCHES_SUMMED)
            load_summed(next_group, summed_stage ^ 1, valid_in(next_tile));
        }
      } else {
        load_values(key_tile, 0, valid_in(key_tile));
      }
      if constexpr (!PREFETCHES_SUMMED) {
        if (tile == 0)
          load_summed(group, 0, valid_in(key_tile));
      }
      cp_async_commit();
      if constexpr (BLOCK_SCALES && !DQ16)
        group_scale = *unit_of(at, group / GROUPS_A_UNIT);

      float2 key_scales = {1, 1};
      if constexpr (!QK16)
        key_scales =
            read_float2(shared + SharedLayout::KEY_SCALES + stage * SharedLayout::KEY_SCALES_BYTES +
                        quad_lane * 16 + (key_tile & 1) * 8);
      Scores::Sum sums[COLUMNS8][4];
      issue_scores(sums, queries, shared + SharedLayout::KEYS + stage * SharedLayout::KEYS_BYTES);
      if constexpr (STAGES == 1) {
        finish<0>(sums);
        wait_for_tiles();
        if (!last || more)
          load_keys(next_tile, 0, valid_in(next_tile));
        cp_async_commit();
      }
      issue_values(ds[tile], dout,
                   shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES, start);
      if constexpr (STAGES == 2)
        finish<1>(sums);
      float x[COLUMNS8][4];
      probabilities(x, sums, row, key_scales,
                    mean_scores_of(at, first_query, key_tile * TOKENS_PER_TILE));
      if (masked.value)
        hide(x, HiddenKeys(at, query[0], key_tile * TOKENS_PER_TILE, SINK_KEYS));
      if constexpr (BLOCK_SCALES && !DQ16) {
#pragma unroll
        for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            largest_p = max_nan(largest_p, x[j][i]);
        }
      }
      finish_values<0>(ds[tile], start);
      score_gradients<!DQ16>(ds[tile], x, largest_ds);
    }
    const u32 summed = shared + SharedLayout::SUMMED + summed_stage * SharedLayout::SUMMED_BYTES;

    if constexpr (DQ16) {
      u32 ds16[GROUP / 16][4];
      pack_fragments<GROUP / 16>(ds16, ds[0]);
      issue_rows(dq, ds16, summed);
      finish_rows<0>(dq);
    } else {
      if constexpr (BLOCK_SCALES) {
        const u32 maxima = shared + SharedLayout::MAXIMA + (count & 1) * WARPS * 8;
        put_maxima(maxima, largest_ds, largest_p);
        __syncthreads();
        take_maxima(maxima, group, largest_ds, largest_p);
      } else {
        quad_max_nan(largest_ds);
      }
      const Scale low = fast_scale<SIGNED_LEVELS>(largest_ds[0]);
      const Scale high = fast_scale<SIGNED_LEVELS>(largest_ds[1]);
      u32 ds8[GROUP / 32][4];
#pragma unroll
      for (int tile = 0; tile < KEY_TILES; ++tile)
        quantize_fragments<true, 2>(&ds8[2 * tile], ds[tile], low.inverse, high.inverse);
      TokenProducts<true, GROUP / 32> ds_k;
      ds_k.issue(ds8, summed + token_lane());
      if constexpr (HAS_UNITS) {
        if (walk.begins_run<GROUPS_A_UNIT>() && count > 0) {
          const u32 from = load_scales(stage_of(KEY_TILES - 1), walk.previous(), group);
          dq.change_units(from, from + SUM_CHANNELS * 4);
        }
      } else if (count % GROUPS_UNTIL_SETTLED == GROUPS_UNTIL_SETTLED - 1) {
        dq.settle();
      }
      ds_k.template add_to<0>(dq, low.value * group_scale, high.value * group_scale);
    }
    walk.advance();
  };
  const auto take_groups = [&](auto mask_apart) {
    if constexpr (mask_apart.value) {
      while (walk.needs_mask())
        take_group(Always<true>{});
      while (walk.left() > 0)
        take_group(Always<false>{});
    } else {
      while (walk.left() > 0)
        take_group(Sometimes{walk.needs_mask()});
    }
  };
  take_groups(Always<MASK_APART>{});
  cp_async_wait<0>();

  if constexpr (HAS_UNITS)
    dq.multiply_columns(load_scales(0, walk.previous(), walk.number()));
  else if constexpr (BLOCK_SCALES)
    dq.settle();
  finish_dq(p, dq.x);
}
