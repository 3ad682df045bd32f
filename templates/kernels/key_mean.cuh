//===- kernels/key_mean.cuh - Sums over chunks of keys -----------------------===//
//
// For the mean of the keys, which smoothing takes off: the quantising kernel adds the chunks up,
// always in the same order. Reads K once. KEY_RANGE: and V, for key_range
// (tile/prepass/key_range.cuh), as do DP16 (tile/prepass/value_range.cuh) and, of one token in
// eight, SMOOTH_V (tile/prepass/value_sums.cuh).
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/stream_order.cuh"
#include "tile/prepass/key_mean.cuh"
#include "tile/prepass/key_range.cuh"
#include "tile/prepass/value_range.cuh"
#include "tile/prepass/value_sums.cuh"
#include "tile/walk/channels.cuh"
#include "tile/walk/place.cuh"

/// Block (chunk, kv head, batch): k_partial[batch][head][chunk][channel] = sum over its keys.
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  if (!enter_keys<MEAN_CHUNK>(p))
    return;
  const KeyHead at = key_head(p);
  const int length = mean_chunk(at.seq_kv());
  const int first_key = block_of_keys(p) * length;
  const int keys_here = minimum(length, at.seq_kv() - first_key);
  if (PACKED && keys_here <= 0)
    return;
  const Element* keys = p.k + at.first_key(p.k_stride_b, p.k_stride_s) + at.kv_head * p.k_stride_h +
                        first_key * p.k_stride_s + octet * 8;

  float sum[8] = {};
  KeyMaxima maxima;
#pragma unroll 8
  for (int key = row; key < keys_here; key += ROWS_AT_ONCE) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (is_channel(octet * 8, p.channels))
      words = *reinterpret_cast<const uint4*>(keys + key * p.k_stride_s);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<Element>(pairs[i]);
      sum[2 * i] += x.x;
      sum[2 * i + 1] += x.y;
      if constexpr (KEY_RANGE) {
        maxima.take(2 * i, x.x);
        maxima.take(2 * i + 1, x.y);
      }
    }
  }

  __shared__ OfRows sums;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sums[row][octet * 8 + i] = sum[i];
  __syncthreads();
  const s64 chunk = at.flat_kv_head * gridDim.x + blockIdx.x;
  if (threadIdx.x < HEAD_DIM) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; ++r)
      total += sums[r][threadIdx.x];
    p.k_partial[chunk * HEAD_DIM + threadIdx.x] = total;
  }
  if constexpr (KEY_RANGE)
    write_key_range(p.key_range + chunk * KEY_RANGE_FLOATS, maxima,
                    p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h +
                        first_key * p.v_stride_s + octet * 8,
                    p.v_stride_s, keys_here, p.value_channels, sums);
  if constexpr (DP16)
    write_value_range(value_range(p) + chunk * VALUE_RANGE_FLOATS,
                      p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h +
                          first_key * p.v_stride_s + octet * 8,
                      p.v_stride_s, keys_here, p.value_channels, sums);
  if constexpr (SMOOTH_V)
    write_value_sums(value_sums(p) + chunk * HEAD_DIM,
                     p.v + at.first_key(p.v_stride_b, p.v_stride_s) + at.kv_head * p.v_stride_h +
                         first_key * p.v_stride_s + octet * 8,
                     p.v_stride_s, keys_here, p.value_channels, sums);
}
