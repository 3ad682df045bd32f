//===- first_version.cpp - The oldest NVRTC for an architecture -------------===//

#include "runtime/nvrtc/first_version.h"

#include "generator/spec.h"

#include <algorithm>

namespace sagebwd {

int nvrtc::first_version(std::string_view arch) {
  // 12.1, 12.2 and 12.3 know the architecture, and refuse wgmma of integers; 12.4 compiles all.
  constexpr int kIntegerWgmma = 12040;
  for (const Arch& known : all_archs())
    if (known.name == arch)
      return arch == "sm_90a" ? std::max(known.first_cuda, kIntegerWgmma) : known.first_cuda;
  return 0;
}

} // namespace sagebwd
