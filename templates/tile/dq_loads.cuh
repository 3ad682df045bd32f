//===- tile/dq_loads.cuh - What kernels/backward_dq.cuh has in shared memory ------===//
//
// Rows of the block's queries, stages of 64 keys and values, the keys that dS meets, and scales of
// keys; and the copies that bring them there.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/query_gradients.cuh"

/// Keys that share a scale of dS. In 16 bits there is none, and they are those of a tile.
constexpr int GROUP = DQ16 ? TOKENS_PER_TILE : GROUP_KV;
constexpr int KEY_TILES = GROUP / TOKENS_PER_TILE;
/// The keys that dS meets come a group at a time: with the group's only tile, or beside its first.
constexpr bool PREFETCHES_SUMMED = STAGES == 2 && KEY_TILES == 1;
constexpr int GROUPS_A_RUN = CHANNEL_TOKENS_KV / GROUP; ///< whose channels share scales
constexpr int GROUPS_UNTIL_SETTLED = 8;                 ///< where there are no units
/// Whether rows of Q or dO are held in registers: then keys and values come to their place later.
constexpr bool HOLDS_ROWS = SCORE_ROWS_IN_REGISTERS || VALUE_ROWS_IN_REGISTERS;

using Groups = KeyTilesMaskedFirst<GROUP, GROUPS_A_RUN>;

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

/// Starts copies to shared memory: of 64 keys by the number of their tile, or of a group by its
/// own. From there on `valid` tokens of the sequence are left. None of these ends a group of
/// copies.
class Loads {
public:
  __device__ __forceinline__ Loads(const Params& p, const QueryHead& at, u32 shared)
      : p(p), at(at), shared(shared),
        key_tensor(p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h),
        value_tensor(p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h),
        keys8(p.k8 + at.padded_key() * HEAD_DIM), keys_t(p.kt8 + at.padded_key() * HEAD_DIM),
        rows16(p.k_rows + at.padded_key() * HEAD_DIM),
        half_values(DP16 ? half_v(p) + at.padded_key() * HEAD_DIM : nullptr),
        key_scales(p.k8_scale + at.padded_key() / KEYS_A_SCALE) {
    if constexpr (HOLDS_COPIER)
      copy_values.hold();
  }

  /// The block's own rows.
  __device__ __forceinline__ void own_rows(int first_query) const {
    load_score_rows<BLOCK_Q>(shared + SharedLayout::QUERIES,
                             p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
                             p.q + at.first_query(p.q_stride_b, p.q_stride_s) +
                                 at.head * p.q_stride_h + first_query * p.q_stride_s,
                             p.q_stride_s, at.seq_q() - first_query, p.channels);
    load_dout_rows<BLOCK_Q>(shared + SharedLayout::DOUT,
                            dout_copy(p) + (at.padded_query() + first_query) * HEAD_DIM,
                            p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                                at.head * p.dout_stride_h + first_query * p.dout_stride_s,
                            p.dout_stride_s, at.seq_q() - first_query, p.value_channels);
  }
  __device__ __forceinline__ void keys(int tile, int stage, int valid) const {
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
  }
  __device__ __forceinline__ void values(int tile, int stage, int valid) const {
    const u32 destination = shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES;
    if constexpr (DP16)
      load_image<SharedLayout::VALUES_BYTES>(
          destination, half_values + static_cast<s64>(tile) * (TOKENS_PER_TILE * HEAD_DIM));
    else
      load_tile<TOKENS_PER_TILE, VALUE_ROW_BYTES, THREADS>(
          destination, value_tensor + static_cast<s64>(tile * TOKENS_PER_TILE) * p.v_stride_s,
          p.v_stride_s * 2, valid, p.value_channels, copy_values);
  }
  /// The keys that dS meets.
  __device__ __forceinline__ void summed(int group, int stage) const {
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
  }
  /// Brings the scales of the unit of one group and the inverses of that of another, to where
  /// values have been read, and gives their place: sums change their units once a run.
  __device__ __forceinline__ u32 scales(int stage, int group, int next) const {
    const u32 destination = shared + SharedLayout::VALUES + stage * SharedLayout::VALUES_BYTES;
    const QueryHead here = query_head_anew(p);
    __syncthreads();
    load_floats<SUM_CHANNELS, THREADS>(destination, unit_of(here, Groups::run_of(group)) +
                                                        CHANNEL_SCALE * HEAD_DIM);
    load_floats<SUM_CHANNELS, THREADS>(destination + SUM_CHANNELS * 4,
                                       unit_of(here, Groups::run_of(next)) +
                                           CHANNEL_INVERSE * HEAD_DIM);
    cp_async_commit();
    wait_for_tiles();
    return destination;
  }

private:
  const Params& p;
  const QueryHead& at;
  u32 shared;
  const Element *key_tensor, *value_tensor;
  const s8 *keys8, *keys_t;
  const Element* rows16;
  const fp16* half_values;
  const float* key_scales;
  Copier<VALUE_ROW_BYTES, THREADS> copy_values;
};
