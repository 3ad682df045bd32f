//===- diagnosis_cache.h - What the cache's places hold, and can take -----===//
#pragma once

#include "cache/store.h"
#include "runtime/driver_needs.h"

#include <string>
#include <vector>

namespace sagebwd {

/// The user's directory.
struct DirectoryState {
  StoreOptions options;
  std::string error; ///< why kernels are not kept there, or empty
  size_t files = 0;
  uint64_t bytes = 0;
};
/// Tries the directory by a file, which is gone afterwards.
DirectoryState look_at_directory(StoreOptions);

/// A pack that SAGEBWD_CACHE_PACKS names, or a folder of packs that cannot be used.
struct PackState {
  std::string path, error;
  PackSummary summary;
};
/// Reads all of each pack of a file or a folder: a corrupt kernel would fail only where somebody
/// wants it.
std::vector<PackState> look_at_packs(const std::string& path,
                                     const std::vector<uint32_t>& trusted_owners);

} // namespace sagebwd
