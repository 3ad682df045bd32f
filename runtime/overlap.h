//===- overlap.h - Whether tensors of a call share memory -----------------===//
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace sagebwd {

/// The memory of one tensor: rows of contiguous bytes. If the address is null, the area is empty.
struct MemoryArea {
  std::string_view name;
  bool written = false;
  uint64_t address = 0;
  int64_t sizes[3] = {1, 1, 1}; ///< the number of rows in each of three dimensions
  int64_t strides[3] = {};      ///< in bytes
  int64_t row_bytes = 0;
};

/// Whether two areas have a byte in common. Interleaved areas, such as slices of one tensor, have
/// none. If the exact comparison would take too long, the result is false.
bool share_memory(const MemoryArea&, const MemoryArea&);

/// Raises SpecError if an area that is written shares memory with another area.
void check_shared_memory(std::span<const MemoryArea>);

} // namespace sagebwd
