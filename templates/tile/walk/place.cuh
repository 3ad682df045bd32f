//===- tile/walk/place.cuh - Which head of which sequence a block works on -------===//
//
// All that a kernel knows of where sequences lie and how long they are: the grid's y is a head, and
// its z a sequence of the batch or, where sequences are packed, its x a place among theirs
// (tile/walk/packed.cuh). What is computed earlier than it is used costs registers
// (kernels/README.md).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/heads.cuh"
#include "tile/walk/own_keys.cuh"

__device__ __forceinline__ QueryHead query_head(const Params& p) {
  return query_head(p, blockIdx.y / CHANNEL_PARTS, blockIdx.z);
}

/// Reads it again at a kernel's end: so what only the end computes from it, and the beginning did
/// too, takes no registers in between.
__device__ __forceinline__ QueryHead reread_query_head(const Params& p) {
  int head, batch;
  read_block_yz(head, batch);
  return query_head(p, head / CHANNEL_PARTS, batch);
}
