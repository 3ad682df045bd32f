//===- tile/prepass/key_mean.cuh - How the sum of the keys is divided ----------------===//
#pragma once

#include "configuration.cuh"

/// Keys summed by one block: long sequences use the whole GPU, and what needs the mean adds up
/// few sums.
__device__ __forceinline__ int mean_chunk(int keys) {
  const int share = (keys - 1) / MOST_MEAN_CHUNKS + 1;
  return maximum(MEAN_CHUNK, (share + 63) / 64 * 64);
}
__device__ __forceinline__ int mean_chunks(int keys) { return (keys - 1) / mean_chunk(keys) + 1; }
