//===- kernels/quantize.cuh - All that a pass reads of Q, K, V and dO -------===//
//
// One launch a pass: 8-bit copies, and what the attention kernels need of each query. A block takes
// the tokens of one scale block of one head:
//   queries  q8, qt8, dot8, dout_rows, q_rows and, where key 0 is separate, its gradients' sums;
//   where
//            dQ is summed in memory, zeros to start from and, in FP16, its factors
//   keys     k8, kt8 or k_rows and, the head's first, k_mean
//   values   vt8; half_v where dP is summed in FP16, for which queries have half_dout and
//   dp_factor;
//            v_rows of packed sequences, as query_rows and dout_rows of their queries
// The scale block is read by tokens first (tile/prepass/token_share.cuh), for what each token gives
// and for the channels' maxima; then by quads, out of the caches, for the transposed copies, which
// have one scale a channel and scale block (tile/prepass/transposed_copy.cuh). Tokens past the end
// are written as zeros, so that the products need no bounds, and so is key 0 where it is separate.
// Beside linear attention dO stands for exact attention's share of it (tile/prepass/
// shared_dout.cuh).
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/prepass/query_block.cuh"

/// Subtracts the mean, except from tokens that count as zeros.
template <bool SMOOTHED>
__device__ __forceinline__ void smooth(float (&x)[SHARE], const Source& from, int token) {
  if constexpr (SMOOTHED) {
    if (from.has(token)) {
#pragma unroll
      for (int i = 0; i < SHARE; i += 4) {
        const float4 mean = four_of(&shared.mean[channel_of(i)]);
        x[i] -= mean.x;
        x[i + 1] -= mean.y;
        x[i + 2] -= mean.z;
        x[i + 3] -= mean.w;
      }
    }
  }
}

/// Subtracts it from the tokens of a quad, as walk_quads() hands them on.
__device__ __forceinline__ void smooth_quad(float (&x)[4][8], const Source& from, int token,
                                            const float (&mean)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool has = from.has(token + (i & 1) + (i >> 1) * 8);
#pragma unroll
    for (int c = 0; c < 8; ++c)
      x[i][c] -= has ? mean[c] : 0;
  }
}

__device__ __forceinline__ void quantize_keys(const Params& p, const QueryHead& at, int index) {
  const ScaleBlock block = scale_block_of<KEY_TOKENS>(index, at.seq_kv(), at.padded_kv());
  const s64 head_row = at.padded_key(), copy = (head_row + block.first) * HEAD_DIM;
  const Source k = {p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h +
                        block.first * p.k_stride_s,
                    p.k_stride_s, index == 0 ? SINK_KEYS : 0, block.valid, p.channels};
  if constexpr (SMOOTH_K) {
    find_mean(p, at);
    if (index == 0 && threadIdx.x < HEAD_DIM)
      p.k_mean[at.mean_row() * HEAD_DIM + threadIdx.x] = shared.mean[threadIdx.x];
    __syncthreads();
  }

  float of_group = 0, largest[SHARE] = {};
  if constexpr (INT8_S && BLOCK_SCALES) {
    walk_tokens(k, block.written, [&](int token, const Share& share) {
      float x[SHARE];
      share.unpack_to(x);
      smooth<SMOOTH_K>(x, k, token);
      rotate(x);
      of_group = max_nan(of_group, largest_magnitude(x));
    });
    of_group = block_max(of_group);
  }
  if constexpr (INT8_S || KT8 || K_ROWS) {
    walk_tokens(k, block.written, [&](int token, const Share& share) {
      float x[SHARE];
      share.unpack_to(x);
      smooth<SMOOTH_K>(x, k, token);
      if constexpr (KT8 && !MAXIMA_APART)
        keep_maxima(largest, x);
      if constexpr (K_ROWS)
        write_elements(p.k_rows + copy, token, x);
      if constexpr (INT8_S) {
        rotate(x);
        const float scale =
            write_row(p.k8 + copy, token, x,
                      BLOCK_SCALES ? of_group : largest_of_scale(largest_magnitude(x)));
        if (lane_id() == 0) // the tokens of its warps are those that share a scale
          p.k8_scale[head_row / KEYS_A_SCALE + key_scale_place(block.first + token)] = scale;
      }
    });
  }
  if constexpr (KT8 && MAXIMA_APART) {
    find_maxima(k, block.written, [&](float(&x)[8], int token, int i) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        x[c] -= SMOOTH_K && k.has(token) ? shared.mean[channel_of(i) + c] : 0;
    });
  }
  if constexpr (KT8) {
    find_channel_scales(
        largest,
        sample_of(p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h,
                  p.k_stride_s, at.seq_kv(), p.channels),
        1.0f, p.kt8_scale, at.first_key_scale_block<KEY_TOKENS>() + index, shared.inverse);
    float mean[8];
#pragma unroll
    for (int c = 0; c < 8; ++c)
      mean[c] = SMOOTH_K ? shared.mean[QuadPlace().channel + c] : 0;
    walk_quads<true>(k, block.written, shared.inverse, p.kt8 + copy,
                     [&](float(&x)[4][8], int token, int) { smooth_quad(x, k, token, mean); });
  }
}

/// Quantises a scale block's values; those before `begin` count as zeros.
__device__ __forceinline__ Source values_of(const Params& p, const QueryHead& at,
                                            const ScaleBlock& block, int begin) {
  return {p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h +
              block.first * p.v_stride_s,
          p.v_stride_s, begin, block.valid, p.value_channels};
}

__device__ __forceinline__ void quantize_values(const Params& p, const QueryHead& at, int index) {
  const ScaleBlock block = scale_block_of<KEY_TOKENS>(index, at.seq_kv(), at.padded_kv());
  const Source v = values_of(p, at, block, index == 0 ? SINK_KEYS : 0);
  float largest[SHARE];
  if constexpr (SMOOTH_V) {
    find_value_mean(p, at, at.first_key_scale_block<KEY_TOKENS>() + index);
#pragma unroll
    for (float& x : largest)
      x = 0;
    walk_tokens(v, block.written, [&](int token, const Share& share) {
      float x[SHARE];
      share.unpack_to(x);
      smooth<true>(x, v, token);
      keep_maxima(largest, x);
    });
  } else if constexpr (MAXIMA_APART) {
    find_maxima(v, block.written, [](float(&)[8], int, int) {});
  } else {
    ShareMaxima maxima;
    walk_tokens(v, block.written, [&](int, const Share& share) { maxima.take(share); });
    maxima.unpack_to(largest);
  }
  find_channel_scales<VALUE_VECTORS>(
      largest,
      sample_of(p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h,
                p.v_stride_s, at.seq_kv(), p.value_channels),
      1.0f, p.vt8_scale, at.first_key_scale_block<KEY_TOKENS>() + index, shared.inverse);
  s8* copy = p.vt8 + (at.padded_key() + block.first) * HEAD_DIM;
  if constexpr (SMOOTH_V) {
    float mean[8];
#pragma unroll
    for (int c = 0; c < 8; ++c)
      mean[c] = shared.mean[QuadPlace().channel + c];
    walk_quads<true>(v, block.written, shared.inverse, copy,
                     [&](float(&x)[4][8], int token, int) { smooth_quad(x, v, token, mean); });
  } else {
    walk_quads<true>(v, block.written, shared.inverse, copy, [](float(&)[4][8], int, int) {});
  }
}

/// V as it comes, key 0 with it; DP16: as dP's product has it.
__device__ __forceinline__ void copy_values(const Params& p, const QueryHead& at, int index) {
  const ScaleBlock block = scale_block_of<KEY_TOKENS>(index, at.seq_kv(), at.padded_kv());
  if constexpr (DP16) {
    const Source v = values_of(p, at, block, 0);
    const Power power = find_values(p, at);
    walk_tokens(v, block.written, [&](int token, const Share& share) {
      float x[SHARE];
      share.unpack_to(x);
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        x[i] = v.has(token) ? (x[i] - value_centre()[channel_of(i)]) * power.value : 0;
      write_elements(half_v(p) + (at.padded_key() + block.first) * HEAD_DIM, token, x);
    });
    return;
  }
  walk_tokens(values_of(p, at, block, 0), block.written, [&](int token, const Share& share) {
    write_share(p.v_rows + (at.padded_key() + block.first) * HEAD_DIM, token, share);
  });
}

/// Block (scale block of some role, query head, batch). The scale blocks of keys of one head are
/// divided among the heads of queries that see them. Those that have most to do start first.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  if constexpr (DQ_TURNS) { // the ticket; packed sequences may have no queries
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0)
      p.dq_turns[0] = 0;
  }
  const QueryHead at = query_head(p);
  const int query_scale_blocks = at.query_scale_blocks<QUERY_TOKENS>(),
            key_scale_blocks = at.key_scale_blocks<KEY_TOKENS>();
  int index = BACKWARD ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  if (index < query_scale_blocks) {
    if (enter_scale_block<QUERY_TOKENS, true>(p, index))
      quantize_queries(p, at, index);
    return;
  }
  const int heads = p.heads / p.heads_kv, share = ceil_div(key_scale_blocks, heads);
  index -= query_scale_blocks;
  int block = index % share * heads + at.head % heads;
  if (block >= key_scale_blocks || !enter_scale_block<KEY_TOKENS, false>(p, block))
    return;
  if (V_ROWS && index >= share)
    copy_values(p, at, block);
  else if (VT8 && (!INT8_S || index >= share))
    quantize_values(p, at, block);
  else
    quantize_keys(p, at, block);
}
