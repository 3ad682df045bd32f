//===- kernels/key_mean.cuh - Mean of the keys, from the sums of chunks ----===//

#include "configuration.cuh"
#include "tile/place.cuh"

/// Block (1, kv head, batch): k_mean[batch][head][channel], one thread a channel.
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  const KeyHead at = key_head(p);
  const int chunks = ceil_div(p.seq_kv, MEAN_CHUNK);
  if (threadIdx.x < HEAD_DIM) {
    const float* partial = p.k_partial + at.flat_kv_head * chunks * HEAD_DIM + threadIdx.x;
    float total = 0;
#pragma unroll 8
    for (int chunk = 0; chunk < chunks; ++chunk)
      total += partial[chunk * HEAD_DIM];
    p.k_mean[at.flat_kv_head * HEAD_DIM + threadIdx.x] =
        __fdiv_rn(total, static_cast<float>(at.seq_kv()));
  }
}
