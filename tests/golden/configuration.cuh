//===- configuration.cuh - What a kernel is specialised by: an example ------===//
//
// Written by a test. The emitter puts one kernel's constants and parameters in the place of this
// file, which stands for all kernels at once.
//
//===----------------------------------------------------------------------===//
#pragma once
#pragma nv_diag_suppress 177 // not every kernel uses every constant

#include "base.cuh"

#define KERNEL example

using Element = bf16;
constexpr int HEAD_DIM = 64;
constexpr bool PACKED = false;
constexpr int PLACE_BYTES = 0;
constexpr int PLACE_OFFSET = 45184;
constexpr bool ALL_CHANNELS = true;
constexpr int SUM_CHANNELS = 64;
constexpr int CHANNEL_PARTS = 1;
constexpr int THREADS = 128;
constexpr int WARPS = 4;
constexpr bool CAUSAL = true;
constexpr bool LATER_FIRST = true;
constexpr bool WINDOW = false;
constexpr bool QK16 = false;
constexpr bool DV16 = false;
constexpr bool DQ16 = false;
constexpr bool DK16 = false;
constexpr bool SCALED_DOUT = true;
constexpr int SINK_KEYS = 1;
constexpr bool SMOOTH_K = true;
constexpr bool SMOOTH_Q = false;
constexpr bool USES_MEAN = true;
constexpr bool BENDS_SCORES = false;
constexpr bool BLOCK_SCALES = false;
constexpr bool HAS_LISTS = false;
constexpr int GROUP_Q = 64;
constexpr int GROUP_KV = 128;
constexpr int CHANNEL_TOKENS_Q = 256;
constexpr int CHANNEL_TOKENS_KV = 256;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 128;
constexpr int STAGES = 2;
constexpr int BLOCKS_PER_SM = 2;
constexpr bool MAGIC_SCORES = false;
constexpr bool SCORES_FROM_MAGIC = false;
constexpr int SHARED_BYTES = 0;
constexpr int VALUE_UNROLL = 4;
constexpr bool SCORE_ROWS_IN_REGISTERS = false;
constexpr bool VALUE_ROWS_IN_REGISTERS = false;
constexpr bool MASK_APART = true;
constexpr bool LEAN_COPIES = false;
constexpr bool HOLDS_COPIER = true;
constexpr bool WITH_DQ = false;
constexpr bool BACKWARD = true;
constexpr bool ROTATE = true;
constexpr bool SHIFTED = true;
constexpr bool INT8_S = true;
constexpr bool QT8 = true;
constexpr bool DOT8 = true;
constexpr bool KT8 = true;
constexpr bool K_ROWS = false;
constexpr bool VT8 = false;
constexpr bool DQ_SUM = false;
constexpr bool DQ_TURNS = false;
constexpr bool DQ_SUM16 = false;
constexpr bool V_ROWS = false;
constexpr bool DOUT_ROWS = false;
constexpr bool QUERY_ROWS = false;
constexpr int QUERY_TOKENS = 256;
constexpr int KEY_TOKENS = 256;
constexpr int MEAN_CHUNK = 256;
constexpr int MOST_MEAN_CHUNKS = 16;
constexpr bool KEY_RANGE = false;

struct Params {
  const Element* q;
  s64 q_stride_b;
  s64 q_stride_h;
  s64 q_stride_s;
  const Element* k;
  s64 k_stride_b;
  s64 k_stride_h;
  s64 k_stride_s;
  const Element* v;
  s64 v_stride_b;
  s64 v_stride_h;
  s64 v_stride_s;
  const Element* dout;
  s64 dout_stride_b;
  s64 dout_stride_h;
  s64 dout_stride_s;
  Element* dq;
  s64 dq_stride_b;
  s64 dq_stride_h;
  s64 dq_stride_s;
  const float* dlse;
  float* k_mean;
  s8* q8;
  float* q_rows;
  s8* k8;
  float* k8_scale;
  s8* kt8;
  float* kt8_scale;
  Element* dout_rows;
  Element* k_rows;
  float* tile_p_max;
  float* tile_ds_max;
  float* mean_scores;
  int channels;
  int value_channels;
  int heads;
  int heads_kv;
  int seq_q;
  int seq_kv;
  int padded_q;
  int padded_kv;
  int causal_offset;
  int window_offset;
  float softmax_scale;
  int sequences;
  int apart;
  int diagonal_at_ends;
  const int* first_queries;
  const int* first_keys;
  const int* lengths_q;
  const int* lengths_kv;
  Element* dk;
  s64 dk_stride_b;
  s64 dk_stride_h;
  s64 dk_stride_s;
  Element* dv;
  s64 dv_stride_b;
  s64 dv_stride_h;
  s64 dv_stride_s;
  s8* qt8;
  float* qt8_scale;
  s8* dot8;
  float* dot8_scale;
  float* sink_partial;
  float* dq_sum;
  float* q_mean;
  Element* out;
  s64 out_stride_b;
  s64 out_stride_h;
  s64 out_stride_s;
  float* lse;
  float* k_partial;
  s8* vt8;
  float* vt8_scale;
  Element* v_rows;
  Element* query_rows;
  u32* dq_turns;
  float* key_range;
  bf16* dq_factor;
  const float* given_k_mean;
};
