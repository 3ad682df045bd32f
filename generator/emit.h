//===- emit.h - KernelSpec to CUDA source -----------------------------------===//
#pragma once

#include "generator/kernel.h"
#include "generator/templates.h"

#include <string>
#include <vector>

namespace sagebwd {

/// The generated source and what its launch needs.
struct KernelSource {
  std::string name;     ///< of the extern "C" entry point
  std::string text;     ///< complete, header-free CUDA C++; NVRTC and nvcc take it unchanged
  int threads = 0;      ///< per block
  int shared_bytes = 0; ///< dynamic shared memory per block
  std::vector<std::string> options; ///< of the compiler, beyond those of every kernel
};
/// From the embedded templates, or others. The same spec gives the same bytes on every machine.
/// Raises SpecError.
KernelSource emit(const KernelSpec&);
KernelSource emit_from(const TemplateSource&, const KernelSpec&);

} // namespace sagebwd
