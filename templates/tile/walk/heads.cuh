//===- tile/walk/heads.cuh - Heads of queries and of keys --------------------------===//
//
// This file says where the tokens of a head lie, and how many there are.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "configuration.cuh"
#include "ptx/special.cuh"
#include "tile/walk/channels.cuh"
#include "tile/walk/packed.cuh"

// A warp sums SUM_CHANNELS of a wide head's channels. CHANNEL_PARTS blocks, neighbours in the grid,
// share them out, or two warpgroups of a block that own the same tokens (tile/walk/pair.cuh).
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

  __device__ __forceinline__ int seq_q() const { return PACKED ? packed_place().queries : p.seq_q; }
  __device__ __forceinline__ int seq_kv() const { return PACKED ? packed_place().keys : p.seq_kv; }
  /// Only of packed sequences some may have none.
  __device__ __forceinline__ bool has_no_keys() const { return PACKED && packed_place().keys == 0; }
  /// Counts the padding of copies, too.
  __device__ __forceinline__ int padded_q() const {
    return PACKED ? ceil_div(seq_q(), PADDED_TOKENS) * PADDED_TOKENS : p.padded_q;
  }
  __device__ __forceinline__ int padded_kv() const {
    return PACKED ? ceil_div(seq_kv(), PADDED_TOKENS) * PADDED_TOKENS : p.padded_kv;
  }
  /// A query sees keys up to its own index and so many more.
  __device__ __forceinline__ int causal_offset() const { return p.causal_offset + diagonal(); }
  /// It sees keys from its own index and so many more on, mostly fewer than none.
  __device__ __forceinline__ int window_offset() const { return p.window_offset + diagonal(); }
  /// Gives that of keys, in a row of maxima.
  template <int GROUP> __device__ __forceinline__ int key_groups() const {
    return p.padded_kv / GROUP;
  }
  /// Elements from a tensor of the caller to the sequence's first query or key.
  __device__ __forceinline__ s64 first_query(s64 stride_b, s64 stride_s) const {
    return PACKED && !p.apart ? packed_place().first_query * stride_s : sequence() * stride_b;
  }
  __device__ __forceinline__ s64 first_key(s64 stride_b, s64 stride_s) const {
    return PACKED && !p.apart ? packed_place().first_key * stride_s : sequence() * stride_b;
  }

  __device__ __forceinline__ int sequence() const {
    return PACKED ? packed_place().sequence : batch;
  }

protected:
  /// Says where a head's places for SIZE of its queries or keys each begin.
  template <int SIZE> __device__ __forceinline__ s64 place_of_queries(s64 flat_head) const {
    return PACKED ? flat_head * (p.seq_q / SIZE + p.sequences) + packed_place().first_query / SIZE +
                        packed_place().sequence
                  : flat_head * ceil_div(p.padded_q, SIZE);
  }
  template <int SIZE> __device__ __forceinline__ s64 place_of_keys(s64 flat_kv_head) const {
    return PACKED ? flat_kv_head * (p.seq_kv / SIZE + p.sequences) +
                        packed_place().first_key / SIZE + packed_place().sequence
                  : flat_kv_head * ceil_div(p.padded_kv, SIZE);
  }
  __device__ __forceinline__ s64 padded_query_of(s64 flat_head) const {
    return PACKED ? place_of_queries<PADDED_TOKENS>(flat_head) * PADDED_TOKENS
                  : flat_head * p.padded_q;
  }
  __device__ __forceinline__ s64 padded_key_of(s64 flat_kv_head) const {
    return PACKED ? place_of_keys<PADDED_TOKENS>(flat_kv_head) * PADDED_TOKENS
                  : flat_kv_head * p.padded_kv;
  }

private:
  /// By how much the mask's edges move with the lengths; else they are in the offsets.
  __device__ __forceinline__ int diagonal() const {
    return PACKED && p.diagonal_at_ends ? packed_place().keys - packed_place().queries : 0;
  }
};

/// The head of a block that owns queries.
struct QueryHead : Sequence {
  int head;
  int kv_head;                 ///< whose keys its queries see
  s64 flat_head, flat_kv_head; ///< of the whole batch's

  /// Says where its queries begin among floats a query.
  __device__ __forceinline__ s64 first_row() const {
    if (PACKED && p.apart)
      return (static_cast<s64>(sequence()) * p.heads + head) * (p.seq_q / p.sequences);
    return flat_head * p.seq_q + (PACKED ? packed_place().first_query : 0);
  }
  /// Says where its tokens begin in the padded copies, and its groups among those of all queries.
  __device__ __forceinline__ s64 padded_query() const { return padded_query_of(flat_head); }
  __device__ __forceinline__ s64 padded_key() const { return padded_key_of(flat_kv_head); }
  template <int GROUP> __device__ __forceinline__ s64 first_group() const {
    return flat_head * (p.padded_q / GROUP);
  }
  /// Counts scale blocks of so many of a head's tokens, or places for those of all sequences.
  template <int TOKENS> __device__ __forceinline__ int query_scale_blocks() const {
    return PACKED ? p.seq_q / TOKENS + p.sequences : ceil_div(p.padded_q, TOKENS);
  }
  template <int TOKENS> __device__ __forceinline__ int key_scale_blocks() const {
    return PACKED ? p.seq_kv / TOKENS + p.sequences : ceil_div(p.padded_kv, TOKENS);
  }
  /// Says where its scale blocks of so many queries or keys begin, each with its own scales of
  /// channels.
  template <int TOKENS> __device__ __forceinline__ s64 first_query_scale_block() const {
    return place_of_queries<TOKENS>(flat_head);
  }
  template <int TOKENS> __device__ __forceinline__ s64 first_key_scale_block() const {
    return place_of_keys<TOKENS>(flat_kv_head);
  }
  /// And of its keys' chunks, of which there are so many.
  template <int TOKENS> __device__ __forceinline__ s64 first_chunk(int chunks) const {
    return PACKED ? place_of_keys<TOKENS>(flat_kv_head) : flat_kv_head * chunks;
  }
  /// Gives its keys' mean among all.
  __device__ __forceinline__ s64 mean_row() const {
    return PACKED ? static_cast<s64>(kv_head) * p.sequences + packed_place().sequence
                  : flat_kv_head;
  }
};
__device__ __forceinline__ QueryHead query_head(const Params& p, int head, int batch) {
  const int kv_head = head / (p.heads / p.heads_kv);
  const s64 flat_head = static_cast<s64>(batch) * p.heads + head;
  const s64 flat_kv_head = static_cast<s64>(batch) * p.heads_kv + kv_head;
  return {{p, batch}, head, kv_head, flat_head, flat_kv_head};
}

/// The head of a block that owns keys.
struct KeyHead : Sequence {
  int kv_head;
  int heads; ///< of queries, that see its keys
  s64 flat_kv_head;

  __device__ __forceinline__ s64 padded_query(int head) const {
    return padded_query_of(static_cast<s64>(batch) * p.heads + head);
  }
  __device__ __forceinline__ s64 padded_key() const { return padded_key_of(flat_kv_head); }
  /// Gives the first of a query head's scale blocks of so many tokens, and of its own keys'.
  template <int TOKENS> __device__ __forceinline__ s64 first_scale_block(int head) const {
    return place_of_queries<TOKENS>(static_cast<s64>(batch) * p.heads + head);
  }
  template <int TOKENS> __device__ __forceinline__ s64 first_key_scale_block() const {
    return place_of_keys<TOKENS>(flat_kv_head);
  }
};
__device__ __forceinline__ KeyHead key_head(const Params& p, int kv_head, int batch) {
  const int heads = p.heads / p.heads_kv;
  const s64 flat_kv_head = static_cast<s64>(batch) * p.heads_kv + kv_head;
  return {{p, batch}, kv_head, heads, flat_kv_head};
}
