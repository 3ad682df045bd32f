//===- key.h - The key of a cached kernel or record -----------------------===//
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

/// The labelled fields that identify one compiled kernel or one tuning record. They never contain a
/// path or the environment, because cached files move between machines.
struct CacheKey {
  /// Pairs of label and value, sorted by label.
  std::vector<std::pair<std::string, std::string>> fields;
  std::string digest; ///< the SHA-256 of the fields, in hexadecimal digits

  /// The value of a field, or empty.
  std::string operator[](const std::string& label) const;
};
/// Makes the key of fields. The digest is SHA-256 over labels and values in the order of labels,
/// each preceded by its length. For a long value (a source) pass its digest as the value, so that a
/// key can be checked from the fields in an entry.
CacheKey make_key(std::vector<std::pair<std::string, std::string>> fields);
/// The SHA-256 of a text, in hexadecimal digits.
std::string sha256_hex(const std::string& text);
/// Whether a text is 64 lower-case hexadecimal digits.
bool is_digest(const std::string&);

} // namespace sagebwd
