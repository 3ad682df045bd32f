//===- configuration.cuh - What a kernel is specialised by: an example ------===//
//
// The emitter puts one kernel's constants and parameters in the place of this file, which stands
// for all kernels at once: with it editors and nvcc open every template as it is.
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
constexpr bool ROTATE = true;
constexpr bool BACKWARD = true;
constexpr bool WRITE_ROWS = true;
constexpr bool WRITE_TRANSPOSED = true;

constexpr bool CAUSAL = true;
constexpr bool QK16 = false;
constexpr bool SMOOTH_K = true;
constexpr bool USES_MEAN = true;
constexpr bool BLOCK_SCALES = false;
constexpr int GROUP_Q = 64;
constexpr int GROUP_KV = 64;
constexpr int BLOCK_Q = 64;
constexpr int BLOCK_KV = 64;
constexpr int WARPS = 4;
constexpr int STAGES = 1;
constexpr int BLOCKS_PER_SM = 2;
constexpr int SHARED_BYTES = 0; ///< not launched: the kernels do not compare
constexpr bool LEAN_COPIES = false;
constexpr int VALUE_UNROLL = 4;
constexpr bool SCORE_ROWS_IN_REGISTERS = true;
constexpr bool VALUE_ROWS_IN_REGISTERS = true;

struct Params {
  const Element *x, *q, *k, *v, *dout;
  Element *out, *dq, *dk, *dv;
  float* lse;
  const float* dlse;
  s8 *rows8, *transposed8, *q8, *k8, *vt8, *qt8, *kt8, *dot8;
  float *k_partial, *k_mean, *transposed8_scale, *k8_scale, *vt8_scale, *kt8_scale;
  float *q_rows, *q_channels, *tile_p_max, *tile_ds_max;
  s64 x_stride_b, x_stride_h, x_stride_s;
  s64 q_stride_b, q_stride_h, q_stride_s;
  s64 k_stride_b, k_stride_h, k_stride_s;
  s64 v_stride_b, v_stride_h, v_stride_s;
  s64 out_stride_b, out_stride_h, out_stride_s;
  s64 dout_stride_b, dout_stride_h, dout_stride_s;
  s64 dq_stride_b, dq_stride_h, dq_stride_s;
  s64 dk_stride_b, dk_stride_h, dk_stride_s;
  s64 dv_stride_b, dv_stride_h, dv_stride_s;
  int heads, heads_kv, seq_q, seq_kv, padded_q, padded_kv, causal_offset;
  float softmax_scale;
};
