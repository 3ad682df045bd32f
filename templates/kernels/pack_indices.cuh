//===- kernels/pack_indices.cuh - Lists of blocks from their numbers ---------===//
//
// block_indices has list_width numbers of blocks of keys for each block of queries, in any order,
// of which the first block_counts count, or all where there are no counts. A warp makes a list of
// them (tile/walk/list_bits.cuh): each lane fills a word of 32 blocks, and sees every number. A
// number of no block, and a count of none or of more numbers than there are, mark the list.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/walk/list_bits.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const s64 list = static_cast<s64>(blockIdx.x) * WARPS + warp_id();
  if (list >= p.lists)
    return;
  const int blocks = key_blocks(p), words = row_words(p);
  const int* indices = p.block_indices + list * p.list_width;
  const int given = p.block_counts ? p.block_counts[list] : p.list_width;
  const int count = minimum(given, p.list_width);
  bool invalid = given < 0 || given > p.list_width;
  for (int i = lane_id(); i < count; i += WORD_BITS)
    invalid |= static_cast<u32>(indices[i]) >= static_cast<u32>(blocks);
  invalid = __any_sync(~0u, invalid);
  for (int first = 0; first < words; first += WORD_BITS) {
    const int word = first + lane_id();
    u32 bits = invalid && word == words - 1 ? INVALID : 0;
    for (int i = 0; i < count; ++i) {
      const int block = indices[i]; // the same for all lanes
      if (block / WORD_BITS == word && static_cast<u32>(block) < static_cast<u32>(blocks))
        bits |= 1u << block % WORD_BITS;
    }
    if (word < words)
      p.packed_bits[list * words + word] = bits;
  }
}
