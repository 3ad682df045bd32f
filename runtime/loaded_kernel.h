//===- loaded_kernel.h - A kernel that is loaded on a device --------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/driver/driver.h"

#include <string>

namespace sagebwd {

/// A kernel that is loaded in a device's primary context.
struct LoadedKernel {
  KernelSpec spec;
  driver::Function function = nullptr;
  unsigned threads = 0;
  unsigned shared_bytes = 0; ///< dynamic shared memory
  int multiprocessors = 1;   ///< of its device
};

/// Loads a kernel into the current context, which is that of `device`, for the life of the process;
/// unloading would have to wait for the device. Raises DriverError.
LoadedKernel load_kernel(const KernelSpec&, const std::string& name, const std::string& cubin,
                         int threads, int shared_bytes, int device);

/// Launches on the device of the current context. If `overlaps`, the kernel may begin before the
/// kernel that this library launched before it has ended. Raises DriverError.
void launch(const LoadedKernel&, const Problem&, const OperandValues&, driver::Stream,
            bool overlaps = false);

} // namespace sagebwd
