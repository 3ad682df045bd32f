//===- kernels/top_blocks.cuh - Lists of the blocks with the best scores -----===//
//
// A row of block_scores has a score for each block of keys. A warp lists the best of a row, as
// tile/sla/best_blocks.cuh says.
//
//===----------------------------------------------------------------------===//

#include "ptx/stream_order.cuh"
#include "tile/sla/best_blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  const s64 list = static_cast<s64>(blockIdx.x) * WARPS + warp_id();
  if (list < p.lists)
    list_best(p, p.block_scores + list * key_blocks(p), list);
}
