//===- gpu_names.h - Architectures of GPUs by name --------------------------===//
#pragma once

#include <string_view>

namespace sagebwd {

/// The architecture of a GPU ("H100", "RTX 4090"), or the architecture for another spelling of its
/// name ("sm_90", "SM_80", "8.0", "compute_80"). Empty if the name means no known architecture.
std::string_view arch_meant_by(std::string_view name);

} // namespace sagebwd
