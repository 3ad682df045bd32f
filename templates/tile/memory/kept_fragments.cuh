//===- tile/memory/kept_fragments.cuh - Fragments of A in shared memory -------------===//
//
// A warpgroup's fragments lie as its threads hold them, so that no bank is asked twice: a thread of
// the warpgroup that owns the same rows needs the same words.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "layouts/block_shape.cuh"
#include "ptx/shared_memory.cuh"

template <int COUNT>
__device__ __forceinline__ void write_fragments(u32 place, const u32 (&a)[COUNT][4]) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    write_words(place + k * FRAGMENT_BYTES + threadIdx.x % 128 * 16, a[k]);
}
template <int COUNT> __device__ __forceinline__ void read_fragments(u32 (&a)[COUNT][4], u32 place) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    read_words(a[k], place + k * FRAGMENT_BYTES + threadIdx.x % 128 * 16);
}

/// P and dS of 64 rows by 64 tokens in 8 bits, with the scales of a thread's two rows of each.
struct KeptScores {
  enum Kind { P, DS };
  static constexpr int FRAGMENTS = 2;
  u32 place;

  __device__ __forceinline__ void write(Kind kind, const u32 (&a)[FRAGMENTS][4], float low,
                                        float high) const {
    write_fragments(place + kind * (FRAGMENTS * FRAGMENT_BYTES), a);
    const float scales[2] = {low, high};
    write_float2(scales_of(kind), scales);
  }
  __device__ __forceinline__ float2 read(Kind kind, u32 (&a)[FRAGMENTS][4]) const {
    read_fragments(a, place + kind * (FRAGMENTS * FRAGMENT_BYTES));
    return read_float2(scales_of(kind));
  }

private:
  __device__ __forceinline__ u32 scales_of(Kind kind) const {
    return place + KEPT_SCALES + kind * (128 * 8) + threadIdx.x % 128 * 8;
  }
};
