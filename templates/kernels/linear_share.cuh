//===- kernels/linear_share.cuh - The exact branch's share of dO -------------===//
//
// dO_s = alpha dO. A thread takes 8 channels of a query at a time. dO_s lies without gaps. A block
// has queries of one list.
//
//===----------------------------------------------------------------------===//

#include "configuration.cuh"
#include "ptx/convert.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/stream_order.cuh"
#include "tile/sla/mixture.cuh"

/// Block (LINEAR_ROWS queries, head, batch).
extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Params p) {
  begin_in_stream_order();
  constexpr int OCTETS = HEAD_DIM / 8, ROWS_AT_ONCE = THREADS / OCTETS;
  constexpr int TURNS = LINEAR_ROWS / ROWS_AT_ONCE;
  const QueryHead at = query_head(p);
  const int channel = threadIdx.x % OCTETS * 8, first = blockIdx.x * LINEAR_ROWS;
  const int row = threadIdx.x / OCTETS;
  static_assert(SPARSE_Q % LINEAR_ROWS == 0);
  const Listed listed = listed_from(p, at, first);
  const Element* from = p.dout + at.batch * p.dout_stride_b + at.head * p.dout_stride_h + channel;
  uint4 given[TURNS];
  float alpha[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int of = row + i * ROWS_AT_ONCE, query = first + of;
    given[i] = make_uint4(0, 0, 0, 0);
    if (query < p.seq_q)
      given[i] = *reinterpret_cast<const uint4*>(from + query * p.dout_stride_s);
    alpha[i] = shares_of(p, at, query, listed).exact;
  }
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int query = first + row + i * ROWS_AT_ONCE;
    const u32 words[4] = {given[i].x, given[i].y, given[i].z, given[i].w};
    u32 shares[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = unpack<Element>(words[w]);
      shares[w] = pack<Element>(x.x * alpha[i], x.y * alpha[i]);
    }
    if (query < p.seq_q)
      store_words(p.sparse_dout + (at.first_row() + query) * HEAD_DIM + channel, shares);
  }
}
