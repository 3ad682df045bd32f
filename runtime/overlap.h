//===- overlap.h - Whether tensors of a call share memory -----------------===//
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace sagebwd {

/// What a call reads or writes: rows of contiguous bytes. A null address is nothing.
struct MemoryArea {
  std::string_view name;
  bool written = false;
  uint64_t address = 0;
  int64_t sizes[3] = {1, 1, 1}; ///< how many rows, in three dimensions
  int64_t strides[3] = {};      ///< in bytes
  int64_t row_bytes = 0;
};

/// Whether two areas have a byte in common. Areas that lie in turns, such as slices of one tensor,
/// have none. Where that would be slow to find out, false.
bool share_memory(const MemoryArea&, const MemoryArea&);

/// Raises SpecError if an area that is written shares memory with another one.
void check_shared_memory(std::span<const MemoryArea>);

} // namespace sagebwd
