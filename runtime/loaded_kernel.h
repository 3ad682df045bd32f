//===- loaded_kernel.h - A kernel on a device -------------------------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/driver/driver.h"

#include <string>

namespace sagebwd {

/// A kernel in a device's primary context.
struct LoadedKernel {
  KernelSpec spec;
  driver::Function function = nullptr;
  unsigned threads = 0;
  unsigned shared_bytes = 0; ///< dynamic
};

/// Into the current context, for the life of the process: unloading would have to wait for the
/// device. Raises DriverError.
LoadedKernel load_kernel(const KernelSpec&, const std::string& name, const std::string& cubin,
                         int threads, int shared_bytes);

/// On the current context's device; one that `overlaps` may begin while the kernel of the library
/// that was launched before it ends. Raises DriverError.
void launch(const LoadedKernel&, const Problem&, const OperandValues&, driver::Stream,
            bool overlaps = false);

} // namespace sagebwd
