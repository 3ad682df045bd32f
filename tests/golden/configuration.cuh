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
constexpr int THREADS = 128;
constexpr int MEAN_CHUNK = 256;
enum class Role { q, k, v, dout };
constexpr Role ROLE = Role::q;
constexpr int GROUP = 64;
constexpr bool BLOCK_SCALES = false;
constexpr bool ROTATE = true;
constexpr bool BACKWARD = true;
constexpr bool USES_MEAN = true;
constexpr bool WRITE_ROWS = true;
constexpr bool WRITE_TRANSPOSED = true;
constexpr bool CAUSAL = true;
constexpr bool QK16 = false;
constexpr bool SMOOTH_K = true;
constexpr int GROUP_Q = 64;
constexpr int GROUP_KV = 128;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 128;
constexpr int WARPS = 4;
constexpr int STAGES = 1;
constexpr int BLOCKS_PER_SM = 2;
constexpr int SHARED_BYTES = 0;
constexpr bool LEAN_COPIES = false;
constexpr int VALUE_UNROLL = 4;
constexpr bool SCORE_ROWS_IN_REGISTERS = true;
constexpr bool VALUE_ROWS_IN_REGISTERS = true;

struct Params {
  const Element* k;
  s64 k_stride_b;
  s64 k_stride_h;
  s64 k_stride_s;
  float* k_partial;
  int heads;
  int heads_kv;
  int seq_q;
  int seq_kv;
  int padded_q;
  int padded_kv;
  int causal_offset;
  float softmax_scale;
  float* k_mean;
  const Element* x;
  s64 x_stride_b;
  s64 x_stride_h;
  s64 x_stride_s;
  s8* rows8;
  s8* transposed8;
  float* transposed8_scale;
  float* k8_scale;
  float* q_rows;
  float* lse;
  Element* out;
  s64 out_stride_b;
  s64 out_stride_h;
  s64 out_stride_s;
  const float* dlse;
  const Element* q;
  s64 q_stride_b;
  s64 q_stride_h;
  s64 q_stride_s;
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
  s8* q8;
  s8* k8;
  s8* kt8;
  float* kt8_scale;
  float* tile_p_max;
  float* tile_ds_max;
  Element* dk;
  s64 dk_stride_b;
  s64 dk_stride_h;
  s64 dk_stride_s;
  Element* dv;
  s64 dv_stride_b;
  s64 dv_stride_h;
  s64 dv_stride_s;
  s8* qt8;
  s8* dot8;
  float* q_channels;
  s8* vt8;
  float* vt8_scale;
};
