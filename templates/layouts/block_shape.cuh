//===- layouts/block_shape.cuh - What layouts of shared memory depend on --===//
//
// A layout says where the parts of a block's shared memory lie: layouts/forward.cuh is that of
// kernels/forward.cuh. Layouts are plain C++. The kernel forms one from constants, the generator
// from a spec and a tile, and a launch gets `total` bytes. Names with _bytes are sizes. The others
// are offsets from the beginning of shared memory, or from what a comment says. Each layout has a
// constructor, because NVRTC's compiler loses sight of an aggregate's members if an initialiser
// calls a function.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/copies.cuh"

struct BlockShape {
  int head_dim;
  int sum_channels; ///< of a gradient, in a block or in a warpgroup of a pair
  int block_q, block_kv, stages;
  int group_kv, channel_tokens_kv;
  bool qk16, dv16, dq16, dk16, block_scales;
  bool lists; ///< walks are over lists of blocks: a run may be one step

  // These follow from the members above.
  int score_row = qk16 ? 2 * head_dim : head_dim; ///< bytes of a token of Q or K for S
  int value_row = 2 * head_dim;                   ///< of a token of V or dO
  int sum_row = 2 * sum_channels;                 ///< of the channels of it that are summed
  /// Whether sums are in units of channel scales, which differ from channel to channel and run to
  /// run.
  bool dq_has_channel_scales = !dq16 && !block_scales;
  bool dkv_has_channel_scales = !(dv16 && dk16) && !block_scales;
  int vector_bytes = sum_channels * 4; ///< one number for each channel that is summed
  /// Q's vectors, then dO's.
  int dkv_channel_scales_bytes = dkv_has_channel_scales ? 2 * CHANNEL_VECTORS * vector_bytes : 0;
};

/// The number of buffers that hold the scales of the runs that begin in a ring's stages, and of the
/// run that sums are in.
constexpr int scale_buffers_of(int stages, int steps_a_run) {
  return 1 + (stages + steps_a_run - 1) / steps_a_run;
}

constexpr int BARRIER_BYTES = 8;
/// A ring has two barriers a stage (tile/memory/ring.cuh).
constexpr int ring_bytes(int stages) { return 2 * stages * BARRIER_BYTES; }

constexpr int ROW_START_BYTES = 1024; ///< RowStart's; what comes behind lies as tiles do
constexpr int ONES_ROWS_BYTES = 2 * 64 * 16;
constexpr int COLUMN_START_BYTES = TOKENS_PER_TILE * 16; ///< of a tile's queries
/// MagicProduct's columns, as many as the widest product has, and its ones.
constexpr int MAGIC_COLUMNS_BYTES = 128 * 16;
constexpr int MAGIC_PRODUCT_BYTES = MAGIC_COLUMNS_BYTES + ONES_ROWS_BYTES;
constexpr int FRAGMENT_BYTES = 128 * 16; ///< of a warpgroup (tile/memory/kept_fragments.cuh)
/// KeptScores': two fragments of P and two of dS, and two scales a thread of each.
constexpr int KEPT_SCALES = 2 * 2 * FRAGMENT_BYTES;
constexpr int KEPT_SCORES_BYTES = KEPT_SCALES + 2 * 128 * 8;
