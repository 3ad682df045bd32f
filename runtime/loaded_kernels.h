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

/// From now on kernels are loaded so that as many of their blocks live on an SM as would on one of
/// a GPU with `sm_bytes` of shared memory, for measurements that stand for that GPU. 0, which is
/// the default, means this GPU's own.
void live_as_with(int sm_bytes);
/// The dynamic shared memory of a block with which as many blocks live on an SM with `of_this`
/// bytes as blocks of `bytes` live on one with `of_other`, or more memory if `bytes` leave less
/// room. Raises SpecError if no block fits there.
int padded_shared_bytes(int bytes, int of_other, int of_this);

} // namespace sagebwd
