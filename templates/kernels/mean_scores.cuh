//===- kernels/mean_scores.cuh - What scores of smoothed queries lack --------===//
//
// Under SMOOTH_Q each query is quantised without the mean of its scale block, and its scores lack
// that mean's: a number a key, the same for all queries of the block. Here they are formed in FP32,
// for what is gained is that the mean meets no quantiser. Keys are as S has them: without their own
// mean, and zeros past the end and where key 0 is separate.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/channels.cuh"
#include "tile/walk/place.cuh"

constexpr int BLOCKS_AT_ONCE = 8; ///< for which a key is read

__shared__ float q_means[BLOCKS_AT_ONCE * HEAD_DIM];

/// 8 channels of a key, from the first of them on.
__device__ __forceinline__ void load_octet(float (&x)[8], const Element* from, const float* mean) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(pairs[i]);
    x[2 * i] = pair.x - (SMOOTH_K ? mean[2 * i] : 0);
    x[2 * i + 1] = pair.y - (SMOOTH_K ? mean[2 * i + 1] : 0);
  }
}

/// Block (THREADS keys, query head, batch): mean_scores[batch][head][scale block][key], in log2
/// units.
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const QueryHead at = query_head(p);
  const int key = blockIdx.x * THREADS + threadIdx.x;
  const bool counts = key >= SINK_KEYS && key < at.seq_kv();
  const Element* from = p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h +
                        key * p.k_stride_s;
  const float* k_mean = p.k_mean + at.mean_row() * HEAD_DIM;
  const int blocks = at.query_scale_blocks<QUERY_TOKENS>();
  const s64 first_scale_block = at.first_query_scale_block<QUERY_TOKENS>();
#pragma unroll 1
  for (int block = 0; block < blocks; block += BLOCKS_AT_ONCE) {
    const int blocks_here = minimum(BLOCKS_AT_ONCE, blocks - block);
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCKS_AT_ONCE * HEAD_DIM; i += THREADS)
      q_means[i] =
          i < blocks_here * HEAD_DIM ? p.q_mean[(first_scale_block + block) * HEAD_DIM + i] : 0;
    __syncthreads();
    float sum[BLOCKS_AT_ONCE] = {};
#pragma unroll 2
    for (int channel = 0; channel < HEAD_DIM; channel += 8) {
      if (!counts || !is_channel(channel, p.channels))
        break;
      float x[8];
      load_octet(x, from + channel, k_mean + channel);
#pragma unroll
      for (int u = 0; u < BLOCKS_AT_ONCE; ++u) {
#pragma unroll
        for (int c = 0; c < 8; ++c)
          sum[u] = __fmaf_rn(x[c], q_means[u * HEAD_DIM + channel + c], sum[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < BLOCKS_AT_ONCE; ++u) {
      if (u < blocks_here)
        p.mean_scores[(first_scale_block + block + u) * at.padded_kv() + key] =
            sum[u] * (p.softmax_scale * LOG2_E);
    }
  }
}
