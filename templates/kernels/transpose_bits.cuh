//===- kernels/transpose_bits.cuh - From lists of keys to lists of queries ---===//
//
// A block takes 32 lists of a query head, 32 blocks of keys a warp at a time: a lane has a word of
// its list, and votes of the warp turn the square of bits over.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/list_bits.cuh"

/// Block (32 blocks of queries, query head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const int head = blockIdx.y, batch = blockIdx.z, columns = column_words(p);
  const int row = blockIdx.x * WORD_BITS + lane_id();
  const u32* list = p.row_bits + batch * p.row_stride_b + head * p.row_stride_h +
                    static_cast<s64>(row) * row_words(p);
  u32* column = p.column_bits +
                (static_cast<s64>(batch) * p.heads + head) * key_blocks(p) * columns + blockIdx.x;
  for (int first = warp_id() * WORD_BITS; first < key_blocks(p); first += WARPS * WORD_BITS) {
    const u32 word = row < query_blocks(p) ? list[first / WORD_BITS] : 0;
    u32 turned = 0;
#pragma unroll
    for (int bit = 0; bit < WORD_BITS; ++bit) {
      const u32 votes = __ballot_sync(~0u, (word >> bit & 1) != 0);
      turned = lane_id() == bit ? votes : turned;
    }
    if (const int block = first + lane_id(); block < key_blocks(p))
      column[static_cast<s64>(block) * columns] = turned;
  }
}
