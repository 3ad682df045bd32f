//===- item.h - A kernel or a tuning record, whichever it is --------------===//
#pragma once

#include "cache/key.h"

#include <string>

namespace sagebwd {

/// What its bytes say of it.
struct Item {
  bool kernel = true; ///< or a tuning record
  bool newer = false; ///< a record that a newer version wrote: not bad, and not ours to read
  CacheKey key;
  std::string name; ///< of the kernel, or what was tuned on what
  std::string arch;
  std::string compiler;
  std::string tile;      ///< of a tuning record
  int lowest_driver = 0; ///< of a kernel, e.g. 12080
};

/// Whether bytes that are sound are a kernel's.
inline bool is_kernel(const std::string& bytes) { return bytes.empty() || bytes.front() != '{'; }
/// Fills in an item of this kind. Why the bytes are none, or empty.
std::string inspect_item(const std::string& bytes, Item&);

} // namespace sagebwd
