//===- loaded_kernels.h - The process's kernels on its devices --------------===//
#pragma once

#include "runtime/kernels.h"
#include "runtime/loaded_kernel.h"

#include <optional>

namespace sagebwd {

/// One that load_once() has loaded on a device.
std::optional<LoadedKernel> find_loaded(const KernelSpec&, int device);

/// The kernel on a device whose context is current. Whatever operations ask for it, it is loaded
/// once: those that differ in the size of their window, say, have the same kernels. Thread-safe.
/// Raises DriverError.
LoadedKernel load_once(const BuiltKernel&, int device);

} // namespace sagebwd
