//===- eviction.h - Keeping a directory within its limit ------------------===//
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sagebwd {

/// A kept kernel as a listing sees it, without opening it.
struct KeptFile {
  std::string digest;
  uint64_t bytes = 0;
  std::chrono::system_clock::time_point last_use; ///< our own stamp, not the file system's atime
  bool in_future = false; ///< its stamp, by a clock that jumped: it counts as now
};
/// Compiled kernels in a directory, least recently used first. Empty for a directory that is not
/// there or is refused.
std::vector<KeptFile> kept_files(const std::string& directory);

struct PruneResult {
  uint64_t kept = 0, kept_bytes = 0;
  uint64_t evicted = 0, evicted_bytes = 0;
  uint64_t in_use = 0; ///< should have been evicted, but a living process uses them
  uint64_t stuck = 0;  ///< should have been evicted and could not
  uint64_t swept = 0;  ///< leftovers of writers that were killed
};
/// Removes leftovers of dead writers, then the least recently used kernels until those that stay
/// take at most `byte_limit` bytes (nothing: no limit), and those not used for `unused_for`.
/// Kernels that a living process uses stay. A dry run only says what would go.
PruneResult prune(const std::string& directory, std::optional<uint64_t> byte_limit,
                  std::optional<std::chrono::seconds> unused_for = std::nullopt,
                  bool dry_run = false);

} // namespace sagebwd
