//===- compile_width.h - How many kernels to compile at a time ------------===//
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace sagebwd {

/// The number of cores that this process may use; at least 1.
size_t usable_cores();

/// The number of threads that may compile at the same time in this process: one for each usable
/// core, but no more than the memory has room for; at least 1.
size_t compile_width();
/// Returns this for a machine with so many cores and bytes; without a number of bytes, memory does
/// not limit the result.
size_t compile_width(size_t cores, std::optional<uint64_t> memory_bytes);

/// The bytes that this process may still allocate without swapping or being killed: the memory that
/// the kernel calls available, limited by the process's control groups (v1 or v2). Returns nothing
/// if neither can be read. `root` is the folder that contains /proc and /sys.
std::optional<uint64_t> available_memory(const std::string& root = "");

} // namespace sagebwd
