//===- kernels/linear_dk.cuh - The mean's part of linear attention's dK -----===//
//
// dK = dK' - mean of dK' over all keys, plus another gradient of the keys if there is one. A thread
// takes 8 channels of a key at a time. dK' lies without gaps, and the other has dK's strides; dK
// may be where either is.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/place.cuh"

/// Block (LINEAR_ROWS keys, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  constexpr int OCTETS = HEAD_DIM / 8, ROWS_AT_ONCE = THREADS / OCTETS;
  constexpr int TURNS = LINEAR_ROWS / ROWS_AT_ONCE;
  const KeyHead at = key_head(p);
  const int channel = threadIdx.x % OCTETS * 8;
  const int first = blockIdx.x * LINEAR_ROWS + threadIdx.x / OCTETS;
  const s64 place = (at.flat_kv_head * p.seq_kv + first) * HEAD_DIM + channel;
  const s64 of_dk = at.batch * p.dk_stride_b + at.kv_head * p.dk_stride_h + channel;
  uint4 own[TURNS], more[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) { // all ahead of the first that is stored
    const bool valid = first + i * ROWS_AT_ONCE < p.seq_kv;
    own[i] = more[i] = make_uint4(0, 0, 0, 0);
    if (valid)
      own[i] = *reinterpret_cast<const uint4*>(p.dk_linear + place + i * ROWS_AT_ONCE * HEAD_DIM);
    if (valid && p.dk_more != nullptr)
      more[i] = *reinterpret_cast<const uint4*>(p.dk_more + of_dk +
                                                (first + i * ROWS_AT_ONCE) * p.dk_stride_s);
  }
  float mean[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
    mean[c] = __ldg(p.dk_mean + at.flat_kv_head * HEAD_DIM + channel + c);
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int key = first + i * ROWS_AT_ONCE;
    const u32 of_own[4] = {own[i].x, own[i].y, own[i].z, own[i].w};
    const u32 of_more[4] = {more[i].x, more[i].y, more[i].z, more[i].w};
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 a = unpack<Element>(of_own[w]), b = unpack<Element>(of_more[w]);
      words[w] = pack<Element>(a.x - mean[2 * w] + b.x, a.y - mean[2 * w + 1] + b.y);
    }
    if (key < p.seq_kv)
      store_words(p.dk + of_dk + key * p.dk_stride_s, words);
  }
}
