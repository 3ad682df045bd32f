//===- tile/sla/mixture.cuh - The exact branch's share of a query's output ------===//
#pragma once

#include "ptx/math.cuh"
#include "tile/walk/list_bits.cuh"
#include "tile/walk/place.cuh"

/// What a list has, as far as the mixture depends on it. Without lists it is `some`.
enum class Listed { nothing, some, everything, invalid };

/// The list of the block of queries that begins at `first`. All lanes of a warp ask together.
__device__ __forceinline__ Listed listed_from(const Params& p, const QueryHead& at, int first) {
  if (p.row_bits == nullptr)
    return Listed::some;
  const int blocks = key_blocks(p), words = row_words(p);
  const u32* row = p.row_bits + at.batch * p.row_stride_b + at.head * p.row_stride_h +
                   static_cast<s64>(first / SPARSE_Q) * words;
  int count = 0;
  for (int i = lane_id(); i < words; i += 32) {
    const int bits = blocks - i * WORD_BITS;
    count += __popc(__ldg(row + i) & (bits < WORD_BITS ? (1u << bits) - 1 : ~0u));
  }
  count = __reduce_add_sync(~0u, count);
  if ((__ldg(row + words - 1) & INVALID) != 0)
    return Listed::invalid;
  // If linear attention sees all keys, it has something beside a list of all blocks.
  return count == 0                      ? Listed::nothing
         : count == blocks && !p.one_sum ? Listed::everything
                                         : Listed::some;
}

/// The shares of a query's output, whose sum is 1.
struct Shares {
  float exact, linear;
};

/// Those of a query whose block has such a list: all is linear attention's where there is no alpha,
/// no query or nothing listed, and all exact attention's where no key is left for the other. With
/// alpha_of_rest they are as what the listed and the other keys weigh, which exp(lse) and exp(rest)
/// are. Both are formed, as 1 - exact would round a small share to nothing.
__device__ __forceinline__ Shares shares_of(const Params& p, const QueryHead& at, int query,
                                            Listed listed) {
  if (p.alpha == nullptr || query >= p.seq_q || listed == Listed::nothing ||
      listed == Listed::invalid)
    return {0, 1};
  if (listed == Listed::everything)
    return {1, 0};
  const float given = __ldg(p.alpha + at.batch * p.alpha_stride_b + at.head * p.alpha_stride_h +
                            query / p.alpha_tokens * p.alpha_stride_s);
  if (!p.alpha_of_rest)
    return {given, 1 - given};
  const float x = (__ldg(p.lse + at.first_row() + query) - given) * LOG2_E;
  return {__fdiv_rn(1.0f, 1 + exp2_approx(-x)), __fdiv_rn(1.0f, 1 + exp2_approx(x))};
}

/// The number of the block's sums among all heads' blocks, or of one for all blocks, which query
/// heads of a group then share.
__device__ __forceinline__ s64 sums_of(bool one, const QueryHead& at) {
  return one ? at.flat_kv_head : at.flat_head * gridDim.x + blockIdx.x;
}
