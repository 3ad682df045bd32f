//===- first_version.cpp - The oldest NVRTC for an architecture -----------===//

#include "runtime/nvrtc/first_version.h"

#include "generator/arch.h"

#include <algorithm>

namespace sagebwd {

int nvrtc::first_version(std::string_view arch) {
  // NVRTC 12.1, 12.2 and 12.3 support the architecture but refuse wgmma of integers; 12.4 is the
  // first to compile every kernel.
  constexpr int kIntegerWgmma = 12040;
  for (const Arch& known : all_archs())
    if (known.name == arch)
      return known.has_wgmma() ? std::max(known.first_cuda, kIntegerWgmma) : known.first_cuda;
  return 0;
}

} // namespace sagebwd
