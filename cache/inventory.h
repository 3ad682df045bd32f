//===- inventory.h - All that is kept, read and checked -------------------===//
//
// For listings: looking at something neither stamps its use nor removes it where it is bad.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/item.h"
#include "cache/pack.h"

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// A file of a directory or an item of a pack, by its name alone.
struct KeptName {
  std::string place;                ///< the directory, or the pack's path
  std::string file;                 ///< in the directory; empty for a pack's item
  std::string digest;               ///< of its key, if it is what it should be
  std::shared_ptr<const Pack> pack; ///< null for the directory's
};
/// Kernels and tuning records, sorted by digest; whatever lies under such a name, a link or a
/// folder too. Nothing for a directory that is not there or is refused.
std::vector<KeptName> kept_names(const std::string& directory);
std::vector<KeptName> kept_names(const std::shared_ptr<const Pack>&);

/// An item, and what of it is sound.
struct KeptItem : Item, KeptName {
  bool in_pack = false;
  uint64_t bytes = 0;
  std::optional<std::chrono::system_clock::time_point> last_use; ///< of a file in the directory
  std::string problem;                                           ///< why it is bad, or empty
};
/// Nothing where it is no longer there. `bytes`, if given, gets those of a sound item.
std::optional<KeptItem> read_kept(const KeptName&, std::string* bytes = nullptr);

/// What a pack's manifest says of it.
struct PackSummary {
  size_t kernels = 0, records = 0;
  std::vector<std::string> archs;
  int lowest_driver = 0; ///< of the driver that loads all of it
  std::map<std::pair<std::string, int>, size_t> kernels_by_driver; ///< by arch and lowest driver
};
/// Raises PackError for a manifest that cannot be read.
PackSummary summarize(const Pack&);

} // namespace sagebwd
