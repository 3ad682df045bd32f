//===- compile_kernel.h - From a kernel's source to its cache entry -------===//
#pragma once

#include "runtime/kernel_builder.h"

namespace sagebwd {

/// Compiles with NVRTC. Raises CompileError if the result has spills or ptxas warnings, unless
/// `allow_spills`; such a result is not kept in the cache.
KernelBuilder::Compiled compile_kernel(const KernelSource&, const KernelSpec&, bool allow_spills);
/// This one allows spills if SAGEBWD_ALLOW_SPILLS or SAGEBWD_DEBUG_WAITS is 1.
KernelBuilder::Compiled compile_with_nvrtc(const KernelSource&, const KernelSpec&);

} // namespace sagebwd
