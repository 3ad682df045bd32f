//===- pack_lists.h - Lists of blocks become bits --------------------------===//
#pragma once

#include "runtime/attention.h"
#include "runtime/loaded_kernel.h"

namespace sagebwd {

/// Attention::pack_lists(), for an operation of this spec on this device.
void launch_packing(const ListsToPack&, const ResolvedSpec&, const Arch&, int device);

/// A kernel that no pass launches, loaded on the current device; built and loaded first where it is
/// missing, unless the stream is being captured.
LoadedKernel loaded_beside(const KernelSpec&, const ResolvedSpec&, int device, void* stream);

/// The error that `which` kernels would have to be built or loaded during a capture.
DriverError not_loaded(const std::string& which, const AttentionSpec&);

} // namespace sagebwd
