//===- kernels/pack_mask.cuh - Lists of blocks from a mask -------------------===//
//
// block_mask has a byte for each block of queries and each of keys; a byte that is not 0 lists the
// block. A warp makes a list of it (tile/walk/list_bits.cuh), 32 bytes a word.
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
  const s8* mask = p.block_mask + list * blocks;
  for (int word = 0; word < words; ++word) {
    const int block = word * WORD_BITS + lane_id();
    const u32 bits = __ballot_sync(~0u, block < blocks && mask[block] != 0);
    if (lane_id() == 0)
      p.packed_bits[list * words + word] = bits;
  }
}
