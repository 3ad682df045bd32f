//===- kernels/round_dq.cuh - dQ from its sums in memory --------------------===//
//
// Behind a backward that has added up dQ in memory (tile/dq/dq_sums.cuh, tile/dq/dq_sums16.cuh):
// what it has not summed is added, key 0's share and the mean's, and dQ is scaled and rounded. A
// warp takes 16 queries.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/stream_order.cuh"
#include "tile/dq/dq_ends.cuh"
#include "tile/dq/dq_sums16.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  if (!enter_queries<BLOCK_Q>(p, store_empty))
    return;
  const QueryHead at = query_head(p);
  const int warp_query = block_of_queries() * BLOCK_Q + warp_id() * DQ_ROWS;
  const int row = warp_query + lane_id() / 4, query[2] = {row, row + 8};

  Sums dq;
  if constexpr (SINK_KEYS != 0)
    begin_with_sink(p, dq, at, query, nullptr);
  const s64 first = at.padded_query() + warp_query;
  const DqSum* sums = dq_sums_of(p) + first * HEAD_DIM;
  add_sums(dq.x, sums, p.dq_factor + first);
  finish_dq(p, dq.x);
}
