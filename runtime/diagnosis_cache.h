//===- diagnosis_cache.h - Examine the cache directory and packs ----------===//
#pragma once

#include "cache/store.h"
#include "runtime/driver_needs.h"
#include "runtime/settings.h"

#include <string>
#include <vector>

namespace sagebwd {

/// The state of the user's cache directory.
struct DirectoryState {
  StoreOptions options;
  std::string error; ///< why kernels cannot be kept there, or empty
  size_t files = 0;
  uint64_t bytes = 0;
};
/// Tests a directory by writing a file and removing it.
DirectoryState look_at_directory(StoreOptions);

/// The state of a pack that SAGEBWD_CACHE_PACKS names, or of a folder of packs that cannot be used.
struct PackState {
  std::string path, error;
  PackSummary summary;
  DriverNeeds current; ///< of the kernels that this version of sagebwd can find
};
/// Reads each pack of a file or a folder completely: a kernel that is corrupt, or of another
/// version of sagebwd, would otherwise show only when somebody needs it.
std::vector<PackState> look_at_packs(const std::string& path, const Settings&);

} // namespace sagebwd
