//===- item.h - A kernel or a tuning record -------------------------------===//
#pragma once

#include "cache/key.h"

#include <string>

namespace sagebwd {

/// The description of an item that its bytes contain.
struct Item {
  bool kernel = true; ///< false: a tuning record
  /// A record of a newer version: it is not bad, but this version cannot read it.
  bool newer = false;
  CacheKey key;
  std::string name; ///< the kernel's name, or what was tuned on which GPU
  std::string arch;
  std::string compiler;
  std::string tile;      ///< only of a tuning record
  int lowest_driver = 0; ///< only of a kernel, e.g. 12080
};

/// Whether sound bytes are those of a kernel.
inline bool is_kernel(const std::string& bytes) { return bytes.empty() || bytes.front() != '{'; }
/// Fills in an item from bytes of its kind. Returns why the bytes are not valid, or empty.
std::string inspect_item(const std::string& bytes, Item&);

} // namespace sagebwd
