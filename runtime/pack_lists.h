//===- pack_lists.h - Lists of blocks become bits --------------------------===//
#pragma once

#include "runtime/attention.h"

namespace sagebwd {

/// Attention::pack_lists(), for an operation of this spec on this device.
void launch_packing(const ListsToPack&, const ResolvedSpec&, const Arch&, int device);

/// The error that `which` kernels would have to be built or loaded during a capture.
DriverError not_loaded(const std::string& which, const AttentionSpec&);

} // namespace sagebwd
