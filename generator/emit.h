//===- emit.h - KernelSpec to CUDA source -----------------------------------===//
#pragma once

#include "generator/kernel.h"
#include "generator/templates.h"

#include <string>
#include <vector>

namespace sagebwd {

/// The generated source of a kernel, and what a compile and a launch of the kernel need.
struct KernelSource {
  std::string name;     ///< of the extern "C" entry point
  std::string text;     ///< complete CUDA C++ without headers; NVRTC and nvcc compile it unchanged
  int threads = 0;      ///< per block
  int shared_bytes = 0; ///< dynamic shared memory per block
  std::vector<std::string> options; ///< compiler options of this kernel alone
};
/// Generates a kernel's source. A spec and templates give the same bytes on every machine. Raises
/// SpecError.
KernelSource emit(const KernelSpec&, const TemplateSource& = embedded_template);

} // namespace sagebwd
