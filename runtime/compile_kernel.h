//===- compile_kernel.h - From a kernel's source to its cache entry ---------===//
#pragma once

#include "runtime/kernel_builder.h"

namespace sagebwd {

/// Compiles with NVRTC. Raises CompileError for a result with spills or ptxas warnings, unless they
/// are allowed; then it is not kept.
KernelBuilder::Compiled compile_kernel(const KernelSource&, const KernelSpec&, bool allow_spills);
/// As SAGEBWD_ALLOW_SPILLS says.
KernelBuilder::Compiled compile_with_nvrtc(const KernelSource&, const KernelSpec&);

} // namespace sagebwd
