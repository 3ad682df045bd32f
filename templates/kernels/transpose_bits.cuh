//===- kernels/transpose_bits.cuh - From lists of keys to lists of queries ---===//
//
// A block makes the lists of 32 blocks of a head's keys, a warp 32 blocks of queries at a time: a
// lane has a word of its list, and the warp turns the square of bits over. It counts what they
// list, for kernels/order_lists.cuh.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/walk/list_bits.cuh"
#include "tile/walk/turned_bits.cuh"

/// Block (32 blocks of keys, key head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  __shared__ int lengths[WARPS][WORD_BITS];
  begin_in_stream_order();
  const int kv_head = blockIdx.y, batch = blockIdx.z, columns = column_words(p);
  const int heads = p.heads / p.heads_kv, block = blockIdx.x * WORD_BITS + lane_id();
  int length = 0;
  for (int i = warp_id(); i < heads * columns; i += WARPS) {
    const int head = kv_head * heads + i / columns, column = i % columns;
    const int row = column * WORD_BITS + lane_id();
    const u32* list = p.row_bits + batch * p.row_stride_b + head * p.row_stride_h +
                      static_cast<s64>(row) * row_words(p);
    const u32 word = row < query_blocks(p) ? list[blockIdx.x * ROW_STEP] : 0;
    const u32 turned = turn_over(word);
    if (block < key_blocks(p))
      p.column_bits[((static_cast<s64>(batch) * p.heads + head) * key_blocks(p) + block) * columns +
                    column] = turned;
    length += __popc(turned);
  }
  lengths[warp_id()][lane_id()] = length;
  __syncthreads();
  if (warp_id() > 0 || block >= key_blocks(p))
    return;
  for (int warp = 1; warp < WARPS; ++warp)
    length += lengths[warp][lane_id()];
  p.list_lengths[(static_cast<s64>(batch) * p.heads_kv + kv_head) * key_blocks(p) + block] = length;
}
