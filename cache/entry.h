//===- entry.h - One compiled kernel, as it is kept -----------------------===//
#pragma once

#include "cache/key.h"

#include <optional>
#include <string>

namespace sagebwd {

/// What was compiled, by what, and the machine code.
struct CacheEntry {
  std::string kernel_name;
  std::string arch;
  std::string compiler;  ///< e.g. "nvrtc 13.0 build 36424714"
  int lowest_driver = 0; ///< CUDA version of the oldest driver that loads it, e.g. 12080
  int registers = 0;
  int spill_bytes = 0;
  int shared_bytes = 0;  ///< static and dynamic
  double compile_ms = 0; ///< by this process; never kept, so that equal inputs give equal files
  std::string cubin;     ///< bytes
};

/// The file of an entry: magic, format version, checksum of every byte after it, JSON, cubin. The
/// same key and entry give the same bytes.
std::string serialize(const CacheKey&, const CacheEntry&);
/// Nothing where the bytes are not exactly an entry of this key, whatever they are; `why` says.
std::optional<CacheEntry> deserialize(const std::string& bytes, const CacheKey&,
                                      std::string* why = nullptr);

/// An entry whose key is not known beforehand: what listings, packs and `explain` read.
struct StoredEntry {
  CacheKey key;
  CacheEntry entry;
};
/// Nothing where the bytes are not exactly some entry, whose digest is that of its fields.
std::optional<StoredEntry> inspect_entry(const std::string& bytes, std::string* why = nullptr);

} // namespace sagebwd
