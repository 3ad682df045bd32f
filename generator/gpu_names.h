//===- gpu_names.h - Which architecture people mean -------------------------===//
#pragma once

#include <string_view>

namespace sagebwd {

/// The name of the architecture that somebody means who writes a GPU's name ("H100", "RTX 4090"),
/// or an architecture's in another way ("sm_90", "SM_80", "8.0", "compute_80"); else empty.
std::string_view arch_meant_by(std::string_view name);

} // namespace sagebwd
