//===- diagnosis_gpus.h - The GPUs of this machine, and what they need ----===//
#pragma once

#include "generator/spec.h"
#include "runtime/diagnosis.h"
#include "runtime/driver/driver.h"
#include "runtime/driver_needs.h"

#include <exception>
#include <string>
#include <vector>

namespace sagebwd {

/// What looking raises, or nothing.
template <typename Look> std::string error_of(Look&& look) {
  try {
    look();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// What NVRTC can do, or why it cannot be opened.
struct CompilerState {
  std::string path, identity, error;
  int version_major = 0;
  std::vector<std::string> archs;

  /// Why not for an architecture, or nothing.
  std::string why_not(const Arch& arch) const;
};
CompilerState look_for_compiler();

/// A GPU, and the architecture its kernels are built for.
struct GpuState {
  driver::DeviceInfo info;
  std::string arch, error;
};
std::vector<GpuState> look_for_gpus();

/// What the GPUs lack for which there is no kernel yet.
std::vector<Missing> missing_for_gpus(const std::vector<GpuState>&, const CompilerState&);

/// Whether some attention runs on a GPU: its driver loads what NVRTC compiles for it, or one of the
/// kernels that are kept.
bool runs(const GpuState&, const CompilerState&, const DriverNeeds& kept);

} // namespace sagebwd
