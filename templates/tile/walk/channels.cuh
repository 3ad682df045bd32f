//===- tile/walk/channels.cuh - Which channels a head has -------------------------===//
#pragma once

#include "configuration.cuh"

/// Kernels compute with HEAD_DIM channels, of which the caller's tensors have the first ones: all,
/// or so many as a call says, a multiple of 8 (Params::channels, value_channels). Those behind
/// count as zeros, and are not stored.
__device__ __forceinline__ bool is_channel(int channel, int channels) {
  return ALL_CHANNELS || channel < channels;
}
