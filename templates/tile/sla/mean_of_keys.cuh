//===- tile/sla/mean_of_keys.cuh - What is subtracted from keys ahead of phi ------===//
#pragma once

#include "tile/prepass/key_mean.cuh"
#include "tile/sla/channel_matrix.cuh"
#include "tile/walk/own_keys.cuh"

/// Brings into shared memory what the caller gave, or the mean of all keys, from the sums of chunks
/// of them. Gives whether there is either.
__device__ __forceinline__ bool load_key_mean(u32 mean, const Params& p, const KeyHead& at) {
  if (p.given_k_mean != nullptr) {
    load_channels(mean, p.given_k_mean + at.flat_kv_head * HEAD_DIM);
    return true;
  }
  if (p.k_partial == nullptr)
    return false;
  const int chunks = mean_chunks(p.seq_kv);
  for (int channel = threadIdx.x; channel < HEAD_DIM; channel += THREADS) {
    const float* partial = p.k_partial + at.flat_kv_head * chunks * HEAD_DIM + channel;
    float sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < MOST_MEAN_CHUNKS; ++chunk)
      sum += chunk < chunks ? __ldg(partial + chunk * HEAD_DIM) : 0;
    write_float(mean + channel * 4, __fdiv_rn(sum, static_cast<float>(p.seq_kv)));
  }
  return true;
}
