//===- entry.h - One compiled kernel in the cache -------------------------===//
#pragma once

#include "cache/key.h"

#include <optional>
#include <string>

namespace sagebwd {

/// A compiled kernel: its name, its compiler and the machine code.
struct CacheEntry {
  std::string kernel_name;
  std::string arch;
  std::string compiler;  ///< e.g. "nvrtc 13.0 build 36424714"
  int lowest_driver = 0; ///< the CUDA version of the oldest driver that can load it, e.g. 12080
  int registers = 0;
  int spill_bytes = 0;
  int shared_bytes = 0;  ///< static and dynamic shared memory
  double compile_ms = 0; ///< of this process; not stored, so that equal inputs give equal files
  std::string cubin;     ///< the machine code
};

/// The bytes of an entry's file: magic, format version, checksum of all bytes after it, JSON,
/// cubin. A key and an entry always give the same bytes.
std::string serialize(const CacheKey&, const CacheEntry&);
/// Reads an entry. Returns nothing if the bytes, which may be anything, are not exactly an entry of
/// this key; `why` gets the reason.
std::optional<CacheEntry> deserialize(const std::string& bytes, const CacheKey&,
                                      std::string* why = nullptr);

/// An entry with its key, for readers that do not know the key: listings, packs and `explain`.
struct StoredEntry {
  CacheKey key;
  CacheEntry entry;
};
/// Reads an entry of any key. Returns nothing unless the bytes are exactly an entry whose digest is
/// that of its fields.
std::optional<StoredEntry> inspect_entry(const std::string& bytes, std::string* why = nullptr);

} // namespace sagebwd
