//===- compile_width.h - How many kernels to compile at a time -------------===//
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace sagebwd {

/// The cores that this process may use. At least one.
size_t usable_cores();

/// Threads that may compile side by side here and now: one for each core this process may use, but
/// no more than the memory has room for. At least one.
size_t compile_width();
/// The same for a machine of so many cores and bytes; no limit where the bytes are not known.
size_t compile_width(size_t cores, std::optional<uint64_t> memory_bytes);

/// Bytes that this process may still take without swapping or being killed: what the kernel calls
/// available, and no more than what its control groups (v1 or v2) leave it. Nothing where neither
/// is known. `root` is where /proc and /sys are.
std::optional<uint64_t> available_memory(const std::string& root = "");

} // namespace sagebwd
