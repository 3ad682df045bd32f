//===- tile/first_key.cuh - Gradients of the key that is computed apart -----===//
#pragma once

#include "ptx/convert.cuh"
#include "tile/place.cuh"

/// Key 0's gradients, over those of its row, which some of the first THREADS_HERE threads, all of
/// which call this, have stored before a barrier: they come from the pre-pass, a partial sum for
/// each head and SINK_TOKENS queries.
template <int THREADS_HERE>
__device__ __forceinline__ void write_first_key(const KeyHead& at, Element* dk, Element* dv) {
  const int partials = ceil_div(at.p.padded_q, SINK_TOKENS) * at.heads;
  const float* of_head =
      at.p.sink_partial + at.first_unit<SINK_TOKENS>(at.kv_head * at.heads) * (2 * HEAD_DIM);
  for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += THREADS_HERE) {
    float sum = 0;
    for (int partial = 0; partial < partials; ++partial)
      sum += of_head[partial * static_cast<s64>(2 * HEAD_DIM) + i];
    const int channel = i % HEAD_DIM;
    const bool of_dv = i >= HEAD_DIM;
    (of_dv ? dv : dk)[channel].bits =
        static_cast<u16>(pack<Element>(of_dv ? sum : sum * at.p.softmax_scale, 0.0f));
  }
}
