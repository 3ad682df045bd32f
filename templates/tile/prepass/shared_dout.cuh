//===- tile/prepass/shared_dout.cuh - Exact attention's share of dO --------------===//
//
// Stands in the place of whole_dout.cuh. Where linear attention has a part of a query's output
// (tile/sla/mixture.cuh), the gradient of exact attention's is dO_s = alpha dO, in 16 bits. It is
// formed wherever dO is read, which takes less time than to write it for a second reader. Only
// kernels that take rows of dO as they come, as those of a row's own scale do not, need it in
// memory: sparse_dout, without gaps.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/prepass/scale_block.cuh"
#include "tile/sla/mixture.cuh"

/// The alphas of the scale block's queries, by slot.
__device__ __forceinline__ float* exact_shares() {
  __shared__ __align__(16) float shares[QUERY_TOKENS];
  return shares;
}
/// Finds them. The block's threads must meet before they are read.
__device__ __forceinline__ void find_exact_shares(const Params& p, const QueryHead& at,
                                                  const ScaleBlock& block) {
  static_assert(SPARSE_Q % 32 == 0, "the queries of a warp have one list");
  for (int token = threadIdx.x; token < block.written; token += THREADS) {
    const int query = block.first + token; // there is no list behind the last query's
    const Listed listed = listed_from(p, at, minimum(query, p.seq_q - 1));
    exact_shares()[sigma_slot(token)] = shares_of(p, at, query, listed).exact;
  }
}

/// 8 channels of dO_s, rounded, from those of dO.
__device__ __forceinline__ uint4 times(const uint4& octet, float share) {
  float x[8];
  unpack_octet(x, octet);
  return make_uint4(
      pack<Element>(x[0] * share, x[1] * share), pack<Element>(x[2] * share, x[3] * share),
      pack<Element>(x[4] * share, x[5] * share), pack<Element>(x[6] * share, x[7] * share));
}
/// dO_s of a token, from its dO.
__device__ __forceinline__ Share exact_share(const Share& share, int token) {
  const float exact = exact_shares()[sigma_slot(token)];
  Share product;
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
    product.chunks[j] = times(share.chunks[j], exact);
  return product;
}
/// The same of a quad's tokens, as walk_quads() has them.
__device__ __forceinline__ void take_exact_shares(float (&x)[4][8], int slot) {
  const float4 shares = four_of(&exact_shares()[slot]);
  const float factors[4] = {shares.x, shares.y, shares.z, shares.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      const float2 pair =
          unpack<Element>(pack<Element>(x[i][c] * factors[i], x[i][c + 1] * factors[i]));
      x[i][c] = pair.x;
      x[i][c + 1] = pair.y;
    }
  }
}
/// Writes dO_s of a query for kernels that read it.
__device__ __forceinline__ void write_exact_share(const Params& p, const QueryHead& at, int query,
                                                  const Share& share) {
  if (SCALED_DOUT || query >= p.seq_q)
    return;
  Element* row = p.sparse_dout + (at.first_row() + query) * HEAD_DIM;
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j)
    *reinterpret_cast<uint4*>(row + channel_of(8 * j)) = share.chunks[j];
}

/// The magnitude of a head's dO_s, from a sample of its dO, as magnitude_of() finds one. It is
/// inlined and keeps one maximum: as a function of its own, with what the head is computed from in
/// registers around the call, it makes kernels of 128 channels spill.
__device__ __forceinline__ float magnitude_of_head(const Params& p, const Source& sample) {
  const QueryHead at = reread_query_head(p);
  const int step = sample_step(p.seq_q);
  float largest = 0;
#pragma unroll 1
  for (int turn = 0; turn * TOKENS_AT_ONCE < SAMPLED_TOKENS; ++turn) {
    const int token = token_of_turn(turn);
    float exact = 0;
#pragma unroll 1
    for (int lane = 0; lane < 32; lane += LANES_A_TOKEN) { // all lanes ask for one list together
      const int query = __shfl_sync(~0u, token, lane) * step;
      const Listed listed = listed_from(p, at, minimum(query, p.seq_q - 1));
      if (lane_id() / LANES_A_TOKEN == lane / LANES_A_TOKEN)
        exact = shares_of(p, at, query, listed).exact;
    }
#pragma unroll 1
    for (int j = 0; j < CHUNKS; ++j) {
      float x[8];
      unpack_octet(x, times(sample.load(token, channel_of(8 * j)), exact));
#pragma unroll
      for (int c = 0; c < 8; ++c)
        largest = max_magnitude(largest, x[c]);
    }
  }
  const float found = block_max(largest);
  return found > 0 && found < INFINITY_F ? found : 1.0f;
}
