//===- key.h - The name of a cached thing ---------------------------------===//
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// The labelled fields that name one compiled kernel or one tuning record. Never a path or the
/// environment: what is cached moves between machines.
struct CacheKey {
  std::vector<std::pair<std::string, std::string>> fields; ///< label, value; sorted by label
  std::string digest;                                      ///< SHA-256 of the fields, hex

  /// The value of a field, or empty.
  std::string operator[](const std::string& label) const;
};
/// SHA-256 over the labels and values in the labels' order, each preceded by its length. Long
/// values (a source) are handed in as their digest, so that a key can be checked from what an entry
/// shows of it.
CacheKey make_key(std::vector<std::pair<std::string, std::string>> fields);
/// SHA-256 of a text alone, hex.
std::string sha256_hex(const std::string& text);
/// 64 lower-case hexadecimal digits.
bool is_digest(const std::string&);

} // namespace sagebwd
