//===- tile/place.cuh - Which head of which sequence a block works on -------===//
//
// All that a kernel knows of where sequences lie and how long they are: the grid's y is a head and
// its z a sequence of the batch. Sequences of different lengths, one behind the other in a tensor,
// would change what is here. What is computed earlier than it is used costs registers (kernels/
// README.md).
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/special.cuh"
#include "tile/channels.cuh"

// Of a wide head's channels a warp sums SUM_CHANNELS. CHANNEL_PARTS blocks, neighbours in the grid,
// share them out, or two warpgroups of a block that own the same tokens (tile/pair.cuh).
constexpr bool IN_PAIRS = SUM_CHANNELS * CHANNEL_PARTS < HEAD_DIM;
/// The first channel that this warp sums.
__device__ __forceinline__ int first_channel() {
  if constexpr (IN_PAIRS)
    return read_thread_index() / 128 * SUM_CHANNELS;
  return CHANNEL_PARTS == 1 ? 0 : read_block_y() % CHANNEL_PARTS * SUM_CHANNELS;
}
/// The first of the block's tokens that this warp, by its thread's number, owns.
__device__ __forceinline__ int first_token_of_warp(int thread) {
  return (IN_PAIRS ? thread % 128 : thread) / 32 * 16;
}

struct Sequence {
  const Params& p;
  int batch;

  __device__ __forceinline__ int seq_q() const { return p.seq_q; }
  __device__ __forceinline__ int seq_kv() const { return p.seq_kv; }
  /// A query sees keys up to its own index and so many more.
  __device__ __forceinline__ int causal_offset() const { return p.causal_offset; }
  /// It sees keys from its own index and so many more on, mostly fewer than none.
  __device__ __forceinline__ int window_offset() const { return p.window_offset; }
  /// Of keys, in a row of maxima.
  template <int GROUP> __device__ __forceinline__ int key_groups() const {
    return p.padded_kv / GROUP;
  }
  /// Whether padded tokens from this one on are the sequence's, which has so many: the grid is as
  /// long as each of the batch.
  __device__ __forceinline__ bool has(int, int) const { return true; }
  /// Elements from a tensor of the caller to the sequence's first query or key.
  __device__ __forceinline__ s64 first_query(s64 stride_b) const { return batch * stride_b; }
  __device__ __forceinline__ s64 first_key(s64 stride_b) const { return batch * stride_b; }
};

/// Of a block that owns queries.
struct QueryHead : Sequence {
  int head;
  int kv_head;                 ///< whose keys its queries see
  s64 flat_head, flat_kv_head; ///< of the whole batch's

  /// Where its queries begin among floats a query.
  __device__ __forceinline__ s64 first_row() const { return flat_head * p.seq_q; }
  /// Where its tokens begin in the padded copies, and its groups among those of all queries.
  __device__ __forceinline__ s64 padded_query() const { return flat_head * p.padded_q; }
  __device__ __forceinline__ s64 padded_key() const { return flat_kv_head * p.padded_kv; }
  template <int GROUP> __device__ __forceinline__ s64 first_group() const {
    return flat_head * (p.padded_q / GROUP);
  }
  /// The same of units of so many of its keys, each with its own scales of channels.
  template <int TOKENS> __device__ __forceinline__ s64 first_key_unit() const {
    return flat_kv_head * ceil_div(p.padded_kv, TOKENS);
  }
};
__device__ __forceinline__ QueryHead query_head(const Params& p, int head, int batch) {
  const int kv_head = head / (p.heads / p.heads_kv);
  const s64 flat_head = static_cast<s64>(batch) * p.heads + head;
  const s64 flat_kv_head = static_cast<s64>(batch) * p.heads_kv + kv_head;
  return {{p, batch}, head, kv_head, flat_head, flat_kv_head};
}

__device__ __forceinline__ QueryHead query_head(const Params& p) {
  return query_head(p, blockIdx.y / CHANNEL_PARTS, blockIdx.z);
}

/// The same read anew, at a kernel's end: what only the end computes from it, and the beginning
/// did too, takes no registers in between.
__device__ __forceinline__ QueryHead query_head_anew(const Params& p) {
  int head, batch;
  read_block_yz(head, batch);
  return query_head(p, head / CHANNEL_PARTS, batch);
}

/// Of a block that owns keys.
struct KeyHead : Sequence {
  int kv_head;
  int heads; ///< of queries, that see its keys
  s64 flat_kv_head;

  __device__ __forceinline__ s64 padded_query(int head) const {
    return (static_cast<s64>(batch) * p.heads + head) * p.padded_q;
  }
  __device__ __forceinline__ s64 padded_key() const { return flat_kv_head * p.padded_kv; }
  /// The first of a query head's units of so many tokens.
  template <int TOKENS> __device__ __forceinline__ s64 first_unit(int head) const {
    return (static_cast<s64>(batch) * p.heads + head) * ceil_div(p.padded_q, TOKENS);
  }
};
__device__ __forceinline__ KeyHead key_head(const Params& p, int kv_head, int batch) {
  const int heads = p.heads / p.heads_kv;
  const s64 flat_kv_head = static_cast<s64>(batch) * p.heads_kv + kv_head;
  return {{p, batch}, kv_head, heads, flat_kv_head};
}
__device__ __forceinline__ KeyHead key_head(const Params& p) {
  return key_head(p, blockIdx.y / CHANNEL_PARTS, blockIdx.z);
}
/// The same read anew, at a kernel's end.
__device__ __forceinline__ KeyHead key_head_anew(const Params& p) {
  int kv_head, batch;
  read_block_yz(kv_head, batch);
  return key_head(p, kv_head / CHANNEL_PARTS, batch);
}
