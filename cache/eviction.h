//===- eviction.h - Keep a directory within its limit ---------------------===//
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sagebwd {

/// A kernel in the directory as a listing shows it, without opening the file.
struct KeptFile {
  std::string digest;
  uint64_t bytes = 0;
  /// The stamp of the last use, not the file system's atime.
  std::chrono::system_clock::time_point last_use;
  /// The clock has jumped and the stamp lies in the future: it counts as now.
  bool in_future = false;
};
/// The compiled kernels in a directory, least recently used first; empty if the directory does not
/// exist or must not be used.
std::vector<KeptFile> kept_files(const std::string& directory);

struct PruneResult {
  uint64_t kept = 0, kept_bytes = 0;
  uint64_t evicted = 0, evicted_bytes = 0;
  uint64_t in_use = 0; ///< to be evicted, but kept because a living process uses them
  uint64_t stuck = 0;  ///< to be evicted, but could not be removed
  uint64_t swept = 0;  ///< removed files of writers that were killed
};
/// Removes files of writers that were killed, kernels that have not been used for `unused_for`, and
/// the least recently used kernels until the others have at most `byte_limit` bytes (nothing: no
/// limit). Kernels that a living process uses stay. With `dry_run` nothing is removed, and the
/// result says what would be.
PruneResult prune(const std::string& directory, std::optional<uint64_t> byte_limit,
                  std::optional<std::chrono::seconds> unused_for = std::nullopt,
                  bool dry_run = false);

} // namespace sagebwd
