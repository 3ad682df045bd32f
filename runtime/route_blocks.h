//===- route_blocks.h - Which blocks are listed ---------------------------===//
//
// SLA2's router scores pairs of blocks by products of their means and lists the best. These kernels
// give the sums that the means are made of, and the lists; the scores are the caller's. B
// sequences, H and Hk heads, M queries, N keys, D channels, and Tq and Tk blocks of sparse_q
// queries and sparse_kv keys, of which the last may be short.
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

/// Both take an operation whose spec has lists. They raise SpecError if it has none or the
/// arguments are wrong, and what Attention::forward() raises.
void pool_blocks(const BlocksToPool&, const Attention&);
void top_blocks(const BlocksToList&, const Attention&);

} // namespace sagebwd
