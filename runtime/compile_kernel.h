//===- compile_kernel.h - From a kernel's source to its cache entry -------===//
#pragma once

#include "runtime/kernel_builder.h"

namespace sagebwd {

/// Compiles with NVRTC. Raises CompileError if the result has spills or ptxas warnings, unless
/// `allow_spills`; such a result is not kept in the cache.
KernelBuilder::Compiled compile_kernel(const KernelSource&, const KernelSpec&, bool allow_spills);
/// The same; SAGEBWD_ALLOW_SPILLS and SAGEBWD_DEBUG_WAITS decide whether spills are allowed.
KernelBuilder::Compiled compile_with_nvrtc(const KernelSource&, const KernelSpec&);

} // namespace sagebwd
