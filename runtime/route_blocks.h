//===- route_blocks.h - Which blocks are listed ---------------------------===//
//
// SLA2's router scores pairs of blocks by products of their means and lists the best.
// route_blocks() does all of that. top_blocks() takes scores of the caller's, which may make them
// of the sums that pool_blocks() gives. B sequences, H and Hk heads, M queries, N keys, D channels,
// and Tq and Tk blocks of sparse_q queries and sparse_kv keys, of which the last may be short.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"

namespace sagebwd {

struct BlocksToPool {
  Problem problem;
  Tensor q, k;                 ///< as in ForwardArgs
  float* query_sums = nullptr; ///< (B, H, Tq, D), contiguous: the sum of each block's tokens
  float* key_sums = nullptr;   ///< (B, Hk, Tk, D)
  void* stream = nullptr;      ///< a CUstream
};

/// All are contiguous in device memory.
struct BlocksToList {
  Problem problem;               ///< heads_kv is ignored
  const float* scores = nullptr; ///< (B, H, Tq, Tk)
  /// How many blocks each list has, at least 1. NaN counts as the highest score, and of equal ones
  /// the earlier block is taken. A block of score -inf is not, so that a list may have fewer.
  int kept = 0;
  /// (Tk) bytes: not 0 for a block that every list has, whatever its score. They count among
  /// `kept`; lists are longer where there are more of them. Null: none.
  const void* always = nullptr;
  /// The results, one of which may be null: (B, H, Tq, Tk) bytes, 1 where a block is listed and
  /// else 0; and the words of Attention::pack_lists(), (B, H, Tq, list_words()).
  void* mask = nullptr;
  uint32_t* row_bits = nullptr;
  void* stream = nullptr;
};

/// What multiplies the mean of each block of a head: (D, D), or (H, D, D) where each head of
/// queries has its own, of outputs by inputs. A null address: nothing.
struct RouterMap {
  const float* values = nullptr;
  bool per_head = false;
};

/// The score of a block of queries with mean q and one of keys with mean k is (query_map q) .
/// (key_map k). What all keys share is subtracted from them, which changes no order of scores.
struct BlocksToRoute {
  BlocksToPool pooled; ///< the sums are memory that the call writes
  RouterMap query_map, key_map;
  /// As in BlocksToList.
  int kept = 0;
  const void* always = nullptr;
  void* mask = nullptr;
  uint32_t* row_bits = nullptr;
};
/// The most blocks of keys that route_blocks() takes.
inline constexpr int64_t kMostRoutedBlocks = 2048;

/// All take an operation whose spec has lists. They raise SpecError if it has none or the arguments
/// are wrong, and what Attention::forward() raises.
void pool_blocks(const BlocksToPool&, const Attention&);
void top_blocks(const BlocksToList&, const Attention&);
void route_blocks(const BlocksToRoute&, const Attention&);

} // namespace sagebwd
