//===- bucket.h - Problems that share a tuned tile ------------------------===//
#pragma once

#include "generator/plan.h"

#include <cstdint>
#include <string>

namespace sagebwd {

/// A class of problems among which the best tile of a kernel hardly changes. Problems are in one
/// bucket if their lengths round up to the same powers of two, and if all or none of them have
/// enough blocks to fill the GPU.
struct Bucket {
  uint8_t seq_q = 0;  ///< 512 << seq_q queries; fewer count as 512, more as 65536
  uint8_t seq_kv = 0; ///< the same for keys
  /// Whether there are at least two blocks of 128 tokens for each SM, along the queries or keys
  /// over which the kernel's grid runs.
  bool full = false;

  bool operator==(const Bucket&) const = default;
};
/// The bucket of a problem. Allocates no memory.
Bucket bucket_of(KernelKind, const Problem&, int sm_count);
/// The bucket as text, e.g. "q8192 kv8192 full".
std::string to_string(const Bucket&);

} // namespace sagebwd
