//===- first_version.cpp - The oldest NVRTC for an architecture -------------===//

#include "runtime/nvrtc/first_version.h"

#include "generator/spec.h"

#include <algorithm>

namespace sagebwd {

int nvrtc::first_version(std::string_view arch) {
  // Older ones know the architecture, and their ptxas refuses wide wgmma of integers.
  constexpr int kWideIntegerWgmma = 12030;
  for (const Arch& known : all_archs())
    if (known.name == arch)
      return arch == "sm_90a" ? std::max(known.first_cuda, kWideIntegerWgmma) : known.first_cuda;
  return 0;
}

} // namespace sagebwd
