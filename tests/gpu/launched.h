//===- launched.h - Kernels of a pass, launched without the others ----------===//
#pragma once

#include "runtime/kernels.h"
#include "runtime/loaded_kernel.h"
#include "tests/gpu/device.h"

namespace sagebwd::test {

/// Builds and launches the kernels in order, and waits for their end. Fails where anything around
/// the workspace is written.
inline void launch_alone(const std::vector<KernelSpec>& kernels, const Problem& p,
                         const OperandValues& values, const Buffer& workspace) {
  for (const auto& built : build_all(kernels))
    launch(load_kernel(built->spec, built->entry.kernel_name, built->entry.cubin, built->threads,
                       built->shared_bytes, /*device=*/0),
           p, values, nullptr);
  driver::synchronize();
  Faults faults;
  workspace.check_guards("the workspace", faults);
  for (const std::string& fault : faults)
    ADD_FAILURE() << fault;
}

} // namespace sagebwd::test
