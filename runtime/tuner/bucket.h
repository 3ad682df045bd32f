//===- bucket.h - Problems that share a tuned tile --------------------------===//
#pragma once

#include "generator/plan.h"

#include <cstdint>
#include <string>

namespace sagebwd {

/// Problems between which the best tile of a kernel hardly changes: lengths up to the same power of
/// two, and enough blocks to fill the GPU or not.
struct Bucket {
  uint8_t seq_q = 0;  ///< 512 << seq_q queries; shorter ones count as 512, longer ones as 65536
  uint8_t seq_kv = 0; ///< of the keys, likewise
  bool full = false; ///< at least two blocks of 128 for each SM, along what the kernel's grid walks

  bool operator==(const Bucket&) const = default;
};
/// Allocates nothing.
Bucket bucket_of(KernelKind, const Problem&, int sm_count);
/// "q8192 kv8192 full".
std::string to_string(const Bucket&);

} // namespace sagebwd
