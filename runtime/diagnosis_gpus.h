//===- diagnosis_gpus.h - The GPUs of this machine, and what they need ----===//
#pragma once

#include "generator/arch.h"
#include "runtime/diagnosis.h"
#include "runtime/driver/driver.h"
#include "runtime/driver_needs.h"

#include <exception>
#include <string>
#include <vector>

namespace sagebwd {

/// The message of the error that `look` raises, or empty.
template <typename Look> std::string error_of(Look&& look) {
  try {
    look();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// The abilities of NVRTC, or why it cannot be opened.
struct CompilerState {
  std::string path, identity, error;
  int version_major = 0;
  std::vector<std::string> archs;

  /// Why NVRTC cannot compile for an architecture, or empty.
  std::string why_not(const Arch& arch) const;
};
CompilerState look_for_compiler();

/// A GPU and the architecture for which its kernels are built, or why it is not supported.
struct GpuState {
  driver::DeviceInfo info;
  std::string arch, error;
};
std::vector<GpuState> look_for_gpus();

/// Everything that this machine lacks for compiling kernels for its GPUs and running them; kept
/// kernels are ignored.
std::vector<Missing> missing_for_gpus(const std::vector<GpuState>&, const CompilerState&);

/// Whether attention can run on a GPU: the driver can load kernels that NVRTC compiles for it, or a
/// kernel that is kept for it.
bool runs(const GpuState&, const CompilerState&, const DriverNeeds& kept);

} // namespace sagebwd
