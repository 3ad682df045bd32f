//===- entry.h - One compiled kernel, as it is kept ------------------------===//
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// The labelled fields that name one compiled kernel: schema, source, options, architecture.
/// Never a path, a driver or the environment: an entry moves between machines.
struct CacheKey {
  std::vector<std::pair<std::string, std::string>> fields; ///< label, value; in a fixed order
  std::string digest;                                      ///< SHA-256 of the fields, hex
};
/// SHA-256 over the labels and values, each preceded by its length.
CacheKey make_key(std::vector<std::pair<std::string, std::string>> fields);
/// SHA-256 of a text alone, hex.
std::string sha256_hex(const std::string& text);

/// What was compiled, by what, and the machine code.
struct CacheEntry {
  std::string kernel_name;
  std::string arch;
  std::string compiler;      ///< e.g. "nvrtc 13.0 build 36424714"
  std::string source_digest; ///< SHA-256 of the generated source, for `explain`
  std::string options;
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

} // namespace sagebwd
