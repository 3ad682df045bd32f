//===- inventory.h - Read and check everything that is kept ---------------===//
//
// Listings use these functions: they neither renew the time of a file's last use nor remove a bad
// file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/item.h"
#include "cache/pack.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// The name of a file in a directory or of an item in a pack.
struct KeptName {
  std::string place;  ///< the path of the directory or of the pack
  std::string file;   ///< the file's name in the directory; empty for an item of a pack
  std::string digest; ///< the digest of its key, if the file is what its name says
  std::shared_ptr<const Pack> pack; ///< null for a file of the directory
};
/// The kernels and tuning records, sorted by digest, including links and folders with such a name;
/// empty if the directory does not exist or must not be used.
std::vector<KeptName> kept_names(const std::string& directory);
std::vector<KeptName> kept_names(const std::shared_ptr<const Pack>&);

/// The contents of an item, as far as they are sound.
struct KeptItem : Item, KeptName {
  bool in_pack = false;
  uint64_t bytes = 0;
  /// Only for a file of the directory.
  std::optional<std::chrono::system_clock::time_point> last_use;
  std::string problem; ///< why it is bad, or empty
};
/// Reads an item. Returns nothing if it no longer exists. If `bytes` is given, it gets the bytes of
/// a sound item.
std::optional<KeptItem> read_kept(const KeptName&, std::string* bytes = nullptr);

/// The contents of a pack by its manifest.
struct PackSummary {
  size_t kernels = 0, records = 0;
  std::vector<std::string> archs;
  int lowest_driver = 0;      ///< the oldest driver that can load all kernels
  std::vector<CacheKey> keys; ///< of the kernels
};
/// Raises PackError if the manifest cannot be read.
PackSummary summarize(const Pack&);

} // namespace sagebwd
