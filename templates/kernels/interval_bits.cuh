//===- kernels/interval_bits.cuh - Lists of blocks from intervals ------------===//
//
// A list has the blocks of keys of which some query of its block sees a key, as far as intervals
// say (tile/walk/intervals.cuh); the word behind each says in which of them intervals may
// hide a part. A key is asked once: the bounds of a block's intervals decide for each block of
// queries. Where two intervals of a key hide a block only together, it counts as seen in part.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/math/extremes.cuh"
#include "tile/walk/intervals.cuh"
#include "tile/walk/list_bits.cuh"

/// The least and the greatest begins and ends of a block's intervals.
struct Bounds {
  int least_begin[INTERVALS_A_KEY], greatest_begin[INTERVALS_A_KEY];
  int least_end[INTERVALS_A_KEY], greatest_end[INTERVALS_A_KEY];
};

/// A warp finds those of the keys first .. end - 1.
__device__ __forceinline__ Bounds bounds_of(const IntervalsOfHead& of_head, int first, int end) {
  Bounds found;
#pragma unroll
  for (int i = 0; i < INTERVALS_A_KEY; ++i) {
    found.least_begin[i] = found.least_end[i] = GREATEST_INT;
    found.greatest_begin[i] = found.greatest_end[i] = LEAST_INT;
  }
  for (int key = first + lane_id(); key < end; key += 32) {
    const IntervalsOfKey of_key = of_head.of(key);
#pragma unroll
    for (int i = 0; i < INTERVALS_A_KEY; ++i) {
      found.greatest_begin[i] = maximum(found.greatest_begin[i], of_key.begin[i]);
      found.least_end[i] = minimum(found.least_end[i], of_key.end[i]);
      if (of_key.begin[i] >= of_key.end[i])
        continue; // it hides nothing
      found.least_begin[i] = minimum(found.least_begin[i], of_key.begin[i]);
      found.greatest_end[i] = maximum(found.greatest_end[i], of_key.end[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < INTERVALS_A_KEY; ++i) {
    found.least_begin[i] = least_of_warp(found.least_begin[i]);
    found.greatest_begin[i] = greatest_of_warp(found.greatest_begin[i]);
    found.least_end[i] = least_of_warp(found.least_end[i]);
    found.greatest_end[i] = greatest_of_warp(found.greatest_end[i]);
  }
  return found;
}

/// A block makes a word of each list of a head, a warp every so many of them. Neighbours have the
/// words of a list, then come heads and sequences.
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  __shared__ Bounds of_blocks[WORD_BITS];
  begin_in_stream_order();
  const int words = row_words(p) / ROW_STEP;
  const int word = blockIdx.x % words, flat_head = blockIdx.x / words;
  const int head = flat_head % p.heads, batch = flat_head / p.heads;
  const int first_block = word * WORD_BITS;
  const IntervalsOfHead of_head(p, batch, head / (p.heads / p.heads_kv));
  for (int i = warp_id(); i < WORD_BITS && first_block + i < key_blocks(p); i += WARPS) {
    const int first = (first_block + i) * SPARSE_KV;
    const Bounds found = bounds_of(of_head, first, minimum(first + SPARSE_KV, p.seq_kv));
    if (lane_id() == 0)
      of_blocks[i] = found;
  }
  __syncthreads();
  const bool is_block = first_block + lane_id() < key_blocks(p);
  const Bounds bounds = of_blocks[is_block ? lane_id() : 0];
  u32* rows = p.packed_bits + word * ROW_STEP +
              static_cast<s64>(flat_head) * query_blocks(p) * row_words(p);
  for (int list = warp_id(); list < query_blocks(p); list += WARPS) {
    const int first = list * SPARSE_Q, end = minimum(first + SPARSE_Q, p.seq_q);
    bool all = false, any = false;
#pragma unroll
    for (int i = 0; i < INTERVALS_A_KEY; ++i) {
      all = all || (bounds.greatest_begin[i] <= first && bounds.least_end[i] >= end);
      any = any || (bounds.least_begin[i] < end && bounds.greatest_end[i] > first);
    }
    const u32 listed = __ballot_sync(~0u, is_block && !all);
    const u32 in_part = __ballot_sync(~0u, is_block && any && !all);
    u32* row = rows + static_cast<s64>(list) * row_words(p);
    if (lane_id() == 0)
      row[0] = listed, row[1] = in_part;
  }
}
