//===- tile/dq/dq_loads.cuh - What kernels/backward_dq.cuh has in shared memory ------===//
//
// Rows of the block's queries, stages of 64 keys and values, the keys that dS meets, and scales of
// keys; and the copies that bring them there.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/backward_dq.cuh"
#include "tile/math/query_gradients.cuh"

constexpr BackwardDqLayout LAYOUT(SHAPE, SCORE_ROWS_IN_REGISTERS);
constexpr bool HOLDS_ROWS = LAYOUT.holds_rows;
static_assert(HOLDS_ROWS == VALUE_ROWS_IN_REGISTERS, "rows of Q and dO are held together");
constexpr int GROUP = LAYOUT.group, KEY_TILES = GROUP / TOKENS_PER_TILE;
constexpr bool PREFETCHES_SUMMED = LAYOUT.prefetches_summed;
constexpr int GROUPS_A_RUN = CHANNEL_TOKENS_KV / GROUP; ///< whose channels share scales
constexpr int GROUPS_UNTIL_BIAS_IS_SUBTRACTED = 8;      ///< where there are no channel scales

using Groups = KeyTilesMaskedFirst<GROUP, GROUPS_A_RUN>;

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
    load_score_rows<BLOCK_Q>(shared + LAYOUT.queries,
                             p.q8 + (at.padded_query() + first_query) * HEAD_DIM,
                             p.q + at.first_query(p.q_stride_b, p.q_stride_s) +
                                 at.head * p.q_stride_h + first_query * p.q_stride_s,
                             p.q_stride_s, at.seq_q() - first_query, p.channels);
    load_dout_rows<BLOCK_Q>(shared + LAYOUT.dout,
                            dout_copy(p) + (at.padded_query() + first_query) * HEAD_DIM,
                            p.dout + at.first_query(p.dout_stride_b, p.dout_stride_s) +
                                at.head * p.dout_stride_h + first_query * p.dout_stride_s,
                            p.dout_stride_s, at.seq_q() - first_query, p.value_channels);
  }
  __device__ __forceinline__ void keys(int tile, int stage, int valid) const {
    const u32 destination = shared + LAYOUT.keys + stage * LAYOUT.keys_bytes;
    if constexpr (QK16) {
      load_tile<TOKENS_PER_TILE, SCORE_ROW_BYTES, THREADS>(
          destination, key_tensor + static_cast<s64>(tile * TOKENS_PER_TILE) * p.k_stride_s,
          p.k_stride_s * 2, valid, p.channels);
    } else {
      load_swizzled<LAYOUT.keys_bytes>(destination, keys8 + static_cast<s64>(tile) *
                                                                (TOKENS_PER_TILE * HEAD_DIM));
      load_floats<KEY_SCALES_BYTES / 4, THREADS>(shared + LAYOUT.key_scales +
                                                     stage * KEY_SCALES_BYTES,
                                                 key_scales + (tile >> 1) * (KEY_SCALES_BYTES / 4));
    }
  }
  __device__ __forceinline__ void values(int tile, int stage, int valid) const {
    const u32 destination = shared + LAYOUT.values + stage * LAYOUT.values_bytes;
    if constexpr (DP16)
      load_swizzled<LAYOUT.values_bytes>(
          destination, half_values + static_cast<s64>(tile) * (TOKENS_PER_TILE * HEAD_DIM));
    else
      load_tile<TOKENS_PER_TILE, VALUE_ROW_BYTES, THREADS>(
          destination, value_tensor + static_cast<s64>(tile * TOKENS_PER_TILE) * p.v_stride_s,
          p.v_stride_s * 2, valid, p.value_channels, copy_values);
  }
  /// The keys that dS meets.
  __device__ __forceinline__ void summed(int group, int stage) const {
    const u32 destination = shared + LAYOUT.summed + stage * LAYOUT.summed_bytes;
    // A tile of 64 keys holds channel after channel, or 64 channels after 64.
    constexpr int IMAGES = CHANNEL_PARTS == 1 ? 1 : KEY_TILES, ELEMENT = DQ16 ? 2 : 1;
    constexpr int BYTES = LAYOUT.summed_bytes / IMAGES;
#pragma unroll
    for (int image = 0; image < IMAGES; ++image)
      load_swizzled<BYTES>(
          destination + image * BYTES, DQ16 ? static_cast<const void*>(rows16) : keys_t,
          static_cast<s64>(group * IMAGES + image) * (GROUP / IMAGES * HEAD_DIM * ELEMENT) +
              first_channel() * (TOKENS_PER_TILE * ELEMENT));
  }
  /// Brings the scales of one group's scale block and the inverses of another's to where values
  /// have been read, and gives their address: sums are rescaled once a run.
  __device__ __forceinline__ u32 scales(int stage, int group, int next) const {
    const u32 destination = shared + LAYOUT.values + stage * LAYOUT.values_bytes;
    const QueryHead here = reread_query_head(p);
    __syncthreads();
    load_floats<SUM_CHANNELS, THREADS>(destination, scale_block_of(here, Groups::run_of(group)) +
                                                        CHANNEL_SCALE * HEAD_DIM);
    load_floats<SUM_CHANNELS, THREADS>(destination + SUM_CHANNELS * 4,
                                       scale_block_of(here, Groups::run_of(next)) +
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
