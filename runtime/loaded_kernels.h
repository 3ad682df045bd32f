//===- loaded_kernels.h - All loaded kernels of the process ---------------===//
#pragma once

#include "runtime/kernels.h"
#include "runtime/loaded_kernel.h"

#include <optional>

namespace sagebwd {

/// The kernel if load_once() has loaded it on the device, else nothing.
std::optional<LoadedKernel> find_loaded(const KernelSpec&, int device);

/// Loads a kernel on a device whose context is current, or returns the loaded one. Operations share
/// loaded kernels: for example, operations that differ only in the size of their window have the
/// same kernels. Thread-safe. Raises DriverError.
LoadedKernel load_once(const BuiltKernel&, int device);

} // namespace sagebwd
