//===- kernels/linear_mean.cuh - The mean of linear attention's dK' over all keys ---===//
//
// dk_mean = sum of dk_sums, which each block of keys has, over the number of keys. A warp's lanes
// have a channel each, its warps every WARPS-th block; the order of the sums is always the same.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/stream_order.cuh"
#include "tile/walk/place.cuh"

/// Block (32 channels, kv head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  __shared__ float of_warp[WARPS][32];
  const KeyHead at = key_head(p);
  const int channel = blockIdx.x * 32 + lane_id(), blocks = ceil_div(p.seq_kv, SPARSE_KV);
  const float* sums = p.dk_sums + at.flat_kv_head * blocks * HEAD_DIM + channel;
  float sum = 0;
#pragma unroll 16
  for (int block = warp_id(); block < blocks; block += WARPS)
    sum += __ldg(sums + block * HEAD_DIM);
  of_warp[warp_id()][lane_id()] = sum;
  __syncthreads();
  if (warp_id() != 0)
    return;
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp)
    sum += of_warp[warp][lane_id()];
  p.dk_mean[at.flat_kv_head * HEAD_DIM + channel] = __fdiv_rn(sum, static_cast<float>(p.seq_kv));
}
