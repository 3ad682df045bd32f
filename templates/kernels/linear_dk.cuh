//===- kernels/linear_dk.cuh - The mean's part of linear attention's dK -----===//
//
// dK = dK' - mean of dK' over all keys, plus another gradient of the keys if there is one. A thread
// takes 8 channels of a key at a time. All three lie without gaps, and `dk` may be either.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/stream_order.cuh"
#include "tile/place.cuh"

/// Block (LINEAR_ROWS keys, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  constexpr int OCTETS = HEAD_DIM / 8, ROWS_AT_ONCE = THREADS / OCTETS;
  const KeyHead at = key_head(p);
  const int octet = threadIdx.x % OCTETS, first = blockIdx.x * LINEAR_ROWS + threadIdx.x / OCTETS;
  float mean[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    mean[i] = __ldg(p.dk_mean + at.flat_kv_head * HEAD_DIM + octet * 8 + i);
#pragma unroll
  for (int row = first; row < first + LINEAR_ROWS; row += ROWS_AT_ONCE) {
    if (row >= p.seq_kv)
      return;
    const s64 place = (at.flat_kv_head * p.seq_kv + row) * HEAD_DIM + octet * 8;
    const uint4 own = *reinterpret_cast<const uint4*>(p.dk_linear + place);
    uint4 other = make_uint4(0, 0, 0, 0);
    if (p.dk_more != nullptr)
      other = *reinterpret_cast<const uint4*>(p.dk_more + place);
    const u32 of_own[4] = {own.x, own.y, own.z, own.w};
    const u32 of_other[4] = {other.x, other.y, other.z, other.w};
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack<Element>(of_own[i]), b = unpack<Element>(of_other[i]);
      words[i] = pack<Element>(a.x - mean[2 * i] + b.x, a.y - mean[2 * i + 1] + b.y);
    }
    *reinterpret_cast<uint4*>(p.dk + at.batch * p.dk_stride_b + at.kv_head * p.dk_stride_h +
                              row * p.dk_stride_s + octet * 8) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}
