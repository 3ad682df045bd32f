//===- tile/math/magic_start.cuh - What INT8 products start from -----------------===//
#pragma once

#include "ptx/special.cuh"

/// MAGIC_BITS four times, but ptxas does not know: what it knows to be equal it moves into four
/// registers for every sum. No two of three masks of lanes share a bit.
struct MagicStart {
  int bits[4];
  __device__ __forceinline__ MagicStart() {
    const auto [below, self, above] = read_lane_masks();
    bits[0] = MAGIC_BITS | (below & self);
    bits[1] = MAGIC_BITS | (below & above);
    bits[2] = MAGIC_BITS | (self & above);
    bits[3] = MAGIC_BITS | (below & self & above);
  }
};
