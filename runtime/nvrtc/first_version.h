//===- first_version.h - The oldest NVRTC for an architecture -------------===//
#pragma once

#include <string_view>

namespace sagebwd::nvrtc {

/// The first version whose NVRTC compiles every kernel for an architecture, e.g. 12080 for CUDA
/// 12.8; 0 if the architecture has no kernels.
int first_version(std::string_view arch);

} // namespace sagebwd::nvrtc
