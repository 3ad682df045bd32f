//===- kernels/backward_dq.cuh - dQ ---------------------------------------------===//
//
// SageBwd, Algorithm 2, the half that sums over keys. A block takes BLOCK_Q queries of one head, 16
// a warp, and walks over the keys a group at a time, and within a group 64 keys at a time:
//   P  = exp(S - lse)      S as in the forward pass
//   dP = dO V^T - delta    16-bit; the sum starts from -delta, unless it is in FP16 (DP16)
//   dS = P dP              quantised: a scale a query and group (`row`), or one for GROUP_Q x
//   GROUP_KV
//                          (`block`), which backward_dkv reads later
//   dQ += dS K             INT8, or (DQ16) in 16 bits with the smoothed keys, 64 at a time
//
// If STAGES = 2, shared memory holds the next 64 keys and values beside these. If STAGES = 1, there
// is one place for each of both: values are loaded while S is formed, the next keys while dP is
// formed. If STAGES = 0, the keys that dS meets come to the place of the group's last keys: wide
// heads in 99 KB.
//
// Arrays of a tile belong to GroupWork::run(). If they belong to a member that run() calls, wgmma's
// products are serialized for lack of registers (C7511; compiled: 179 registers become 200, and 17
// % more instructions, at D64 under qk16).
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/dq/dq_loads.cuh"
#include "tile/math/mean_scores.cuh"
#include "tile/math/quantizer.cuh"

/// Whether a group needs a mask: known while compiling, or not.
template <bool VALUE> struct Always { static constexpr bool value = VALUE; };
struct Sometimes {
  bool value;
};

/// Under `block` the warps put their maxima side by side; after a barrier each takes the largest.
struct SharedMaxima {
  const Params& p;
  const QueryHead& at;
  int block;

  __device__ __forceinline__ void put(u32 maxima, float (&ds)[2], float& p_max) const {
    ds[0] = warp_max_nan(max_nan(ds[0], ds[1]));
    p_max = warp_max_nan(p_max);
    if (lane_id() == 0) {
      write_float(maxima + warp_id() * 8, ds[0]);
      write_float(maxima + warp_id() * 8 + 4, p_max);
    }
  }
  __device__ __forceinline__ void take(u32 maxima, int group, float (&ds)[2], float& p_max) const {
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
  }
};

/// Processes each group of keys, as one warp.
struct GroupWork {
  const Params& p;
  const QueryHead& at;
  Groups& walk;
  const Loads& load;
  const OwnRows& own;
  const ScoreRows& queries;
  const ValueRows& dout;
  Sums& dq;
  const SharedMaxima& shared_maxima;
  u32 shared;
  int first_query, quad_lane;
  const float (&dp_factor)[2]; ///< DP16: of the thread's rows
  float (&ds_sum)[2];          ///< SUMS_DS: of the thread's rows and columns

  template <typename Masked> __device__ __forceinline__ void run(Masked masked) const {
    const Group group = {walk.number(), walk.next(), walk.count(), walk.left() > 1};
    float ds[KEY_TILES][COLUMNS8][4]; // dP - delta at first
    float largest_ds[2] = {0, 0}, largest_p = 0, group_scale = 1;
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
      const KeyTile at_tile(group, tile, at.seq_kv(), masked.value);
      wait_for_tiles();
      load_ahead(group, at_tile);
      if constexpr (BLOCK_SCALES && !DQ16)
        group_scale = *scale_block_of(at, Groups::run_of(group.number));
      KeysHiddenFrom<COLUMNS8> hidden;
      if constexpr (HIDES_ANYWHERE) // asked before products take registers
        if (masked.value)
          hidden = hidden_keys(at_tile);
      Scores::Sum sums[COLUMNS8][4];
      const float2 key_scales = key_scales_of(at_tile);
      HalfSums<COLUMNS8> half_dp;
      start_products(sums, ds[tile], half_dp, at_tile);
      float x[COLUMNS8][4];
      if constexpr (HAS_SCORE)
        sloped_probabilities(x, sums, own, key_scales, at, at_tile.number * TOKENS_PER_TILE);
      else
        probabilities(x, sums, own.row, key_scales,
                      mean_scores_of(at, first_query, at_tile.number * TOKENS_PER_TILE));
      if (masked.value) {
        if constexpr (!HIDES_ANYWHERE)
          hidden = hidden_keys(at_tile);
        hide(x, hidden);
      }
      if constexpr (BLOCK_SCALES && !DQ16)
        raise(largest_p, x);
      if constexpr (DP16)
        half_dp.subtract_delta_of_rows(ds[tile], dp_factor, own.minus_delta);
      else
        finish_values<0>(ds[tile], start());
      score_gradients<!DQ16>(ds[tile], x, largest_ds);
      if constexpr (SUMS_DS)
        add_rows(ds_sum, ds[tile]);
    }
    const u32 summed = shared + LAYOUT.summed + group.summed_stage() * LAYOUT.summed_bytes;
    if constexpr (STAGES == 0)
      wait_for_tiles();
    if constexpr (DQ16) {
      u32 ds16[GROUP / 16][4];
      pack_fragments<GROUP / 16>(ds16, ds[0]);
      issue_rows(dq, ds16, summed);
      finish_rows<0>(dq);
    } else {
      add_products(ds, largest_ds, largest_p, group_scale, summed, group);
    }
    if constexpr (STAGES == 0) {
      __syncthreads(); // the keys that dS met have been read
      if (group.has_next)
        load.keys(group.next * KEY_TILES, 0, at.seq_kv() - group.next * GROUP);
      cp_async_commit();
    }
    walk.advance();
  }

private:
  /// A group's place in the walk.
  struct Group {
    int number, next, count;
    bool has_next;
    __device__ __forceinline__ int stage_of(int tile) const {
      return STAGES < 2 ? 0 : KEY_TILES == 2 ? tile : count & 1;
    }
    __device__ __forceinline__ int summed_stage() const {
      return PREFETCHES_SUMMED ? count & 1 : 0;
    }
  };
  /// 64 keys of it: the tile's number in the sequence, that of the tile to come, and their stage.
  struct KeyTile {
    int in_group, stage, number, next, seq_kv;
    bool has_next, masked;
    __device__ __forceinline__ KeyTile(const Group& group, int tile, int seq_kv, bool masked)
        : in_group(tile), stage(group.stage_of(tile)), number(group.number * KEY_TILES + tile),
          next(tile == KEY_TILES - 1 ? group.next * KEY_TILES : number + 1), seq_kv(seq_kv),
          has_next(tile < KEY_TILES - 1 || group.has_next), masked(masked) {}
    /// How many tokens are left from a tile on: behind a group without a mask come full ones alone.
    __device__ __forceinline__ int valid_in(int tile) const {
      return masked ? seq_kv - tile * TOKENS_PER_TILE : TOKENS_PER_TILE;
    }
  };
  __device__ __forceinline__ KeysHiddenFrom<COLUMNS8> hidden_keys(const KeyTile& tile) const {
    return {at, own.query[0], tile.number * TOKENS_PER_TILE, SINK_KEYS};
  }
  __device__ __forceinline__ auto start() const {
    return [&own = own](int) {
      return Quad{own.minus_delta[0], own.minus_delta[0], own.minus_delta[1], own.minus_delta[1]};
    };
  }

  /// Starts copying what comes next.
  __device__ __forceinline__ void load_ahead(const Group& group, const KeyTile& tile) const {
    if constexpr (STAGES == 2) {
      if (tile.has_next) {
        load.keys(tile.next, tile.stage ^ 1, tile.valid_in(tile.next));
        load.values(tile.next, tile.stage ^ 1, tile.valid_in(tile.next));
        if constexpr (PREFETCHES_SUMMED)
          load.summed(group.next, group.summed_stage() ^ 1);
      }
    } else {
      load.values(tile.number, 0, tile.valid_in(tile.number));
    }
    if constexpr (!PREFETCHES_SUMMED && STAGES != 0) {
      if (tile.in_group == 0)
        load.summed(group.number, 0);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ float2 key_scales_of(const KeyTile& tile) const {
    if constexpr (QK16)
      return {1, 1};
    return read_float2(shared + LAYOUT.key_scales + tile.stage * KEY_SCALES_BYTES + quad_lane * 16 +
                       (tile.number & 1) * 8);
  }
  /// S, which is there behind it, and the start of dP.
  __device__ __forceinline__ void start_products(Scores::Sum (&sums)[COLUMNS8][4],
                                                 float (&dp)[COLUMNS8][4],
                                                 HalfSums<COLUMNS8>& half_dp,
                                                 const KeyTile& tile) const {
    issue_scores(sums, queries, shared + LAYOUT.keys + tile.stage * LAYOUT.keys_bytes);
    if constexpr (STAGES < 2) {
      finish<0>(sums);
      wait_for_tiles();
      if (STAGES == 0 && tile.in_group == KEY_TILES - 1)
        load.summed(tile.number / KEY_TILES, 0);
      else if (tile.has_next)
        load.keys(tile.next, 0, tile.valid_in(tile.next));
      cp_async_commit();
    }
    const u32 values = shared + LAYOUT.values + tile.stage * LAYOUT.values_bytes;
    if constexpr (DP16)
      half_dp.form(dout, values);
    else
      issue_values(dp, dout, values, start());
    if constexpr (STAGES == 2)
      finish<1>(sums);
  }
  static __device__ __forceinline__ void raise(float& largest, const float (&x)[COLUMNS8][4]) {
#pragma unroll
    for (int j = 0; j < COLUMNS8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        largest = max_nan(largest, x[j][i]);
    }
  }

  /// Adds the group's dS in 8 bits, times its keys, to dQ.
  __device__ __forceinline__ void add_products(float (&ds)[KEY_TILES][COLUMNS8][4],
                                               float (&largest_ds)[2], float& largest_p,
                                               float group_scale, u32 summed,
                                               const Group& group) const {
    if constexpr (BLOCK_SCALES) {
      const u32 maxima = shared + LAYOUT.maxima + (group.count & 1) * WARPS * 8;
      shared_maxima.put(maxima, largest_ds, largest_p);
      __syncthreads();
      shared_maxima.take(maxima, group.number, largest_ds, largest_p);
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
    if constexpr (DQ_HAS_CHANNEL_SCALES) {
      if (walk.begins_run() && group.count > 0) {
        const u32 from = load.scales(group.stage_of(KEY_TILES - 1), walk.previous(), group.number);
        dq.rescale_columns(from, from + SUM_CHANNELS * 4);
      }
    } else if (group.count % GROUPS_UNTIL_BIAS_IS_SUBTRACTED ==
               GROUPS_UNTIL_BIAS_IS_SUBTRACTED - 1) {
      dq.subtract_bias();
    }
    ds_k.template add_to<0>(dq, low.value * group_scale, high.value * group_scale);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  const u32 shared = shared_base<LAYOUT.total>();
  begin_in_stream_order();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const int lane = lane_id(), row_in_warp = lane >> 2, quad_lane = lane & 3;
  const int block = block_of_queries(), first_query = block * BLOCK_Q;
  const QueryHead at = query_head(p);
  const Loads load(p, at, shared);
  Groups walk(at, tokens_from(first_query, BLOCK_Q));
  load.own_rows(first_query);
  cp_async_commit();
  const OwnRows own(p, at, first_query + warp_id() * 16 + row_in_warp);

  ScoreRows queries;
  ValueRows dout;
  const auto load_rows = [&] {
    queries.load(shared + LAYOUT.queries, warp_id() * 16);
    dout.load(shared + LAYOUT.dout, warp_id() * 16);
  };
  if constexpr (HOLDS_ROWS) {
    wait_for_tiles();
    load_rows();
    __syncthreads();
  }
  if (walk.left() > 0) {
    const int valid = at.seq_kv() - walk.first_key();
    load.keys(walk.number() * KEY_TILES, 0, valid);
    if constexpr (STAGES == 2)
      load.values(walk.number() * KEY_TILES, 0, valid);
    if constexpr (PREFETCHES_SUMMED)
      load.summed(walk.number(), 0);
  }
  cp_async_commit();
  if constexpr (!HOLDS_ROWS) {
    wait_for_tiles();
    load_rows();
  }
  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, own.query,
                    scale_block_of(at, Groups::run_of(walk.number())) + CHANNEL_INVERSE * HEAD_DIM);

  float dp_factor[2] = {};
  if constexpr (DP16) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      dp_factor[r] = read_vector(dp_factors(p), at.padded_query(), own.query[r]);
  }
  float ds_sum[2] = {0, 0};
  const SharedMaxima shared_maxima = {p, at, block};
  const GroupWork work = {p,           at,        walk,      load,          own,
                          queries,     dout,      dq,        shared_maxima, shared,
                          first_query, quad_lane, dp_factor, ds_sum};
  const auto process_groups = [&](auto mask_apart) {
    if constexpr (mask_apart.value) {
      while (walk.needs_mask())
        work.run(Always<true>{});
      while (walk.left() > 0)
        work.run(Always<false>{});
    } else {
      while (walk.left() > 0)
        work.run(Sometimes{walk.needs_mask()});
    }
  };
  process_groups(Always<MASK_APART>{});
  cp_async_wait<0>();

  if constexpr (DQ_HAS_CHANNEL_SCALES)
    dq.multiply_columns(load.scales(0, walk.previous(), walk.number()));
  else if constexpr (BLOCK_SCALES)
    dq.subtract_bias();
  finish_dq(p, dq.x, ds_sum);
}
