//===- pack_contents.h - What a pack is about to hold ----------------------===//
//
// Internal to cache/.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace sagebwd {

/// Depends on what the items are, not on their order or number of copies.
struct PackContents {
  std::map<std::string, const std::string*> items; ///< by digest; they outlive this
  std::string manifest;                            ///< JSON; see Pack::manifest()
};
/// Nothing where an item is neither a sound entry nor a sound record, or two differ under one
/// digest; `why` says.
std::optional<PackContents> pack_contents(const std::vector<std::string>& items, uint32_t format,
                                          std::string* why);

} // namespace sagebwd
