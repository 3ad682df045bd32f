//===- compile_kernel.cpp - From a kernel's source to its cache entry -----===//

#include "runtime/compile_kernel.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"

#include <algorithm>

namespace sagebwd {

namespace {

/// The most bytes of spill stores and loads of a thread that are accepted. Kernels are laid out to
/// have none with the NVRTC that the tests use. Another version's ptxas may need a few, which cost
/// too little to refuse the kernel. Every listing shows them.
constexpr int kTolerableSpillBytes = 128;

} // namespace

KernelBuilder::Compiled compile_with_nvrtc(const KernelSource& source, const KernelSpec& spec) {
  // Bounded waits (SAGEBWD_DEBUG_WAITS) take more registers and may cause spills.
  return compile_kernel(source, spec, settings().allow_spills || settings().debug_waits);
}

KernelBuilder::Compiled compile_kernel(const KernelSource& source, const KernelSpec& spec,
                                       bool allow_spills) {
  Nvrtc& nvrtc = Nvrtc::instance();
  Compilation compilation =
      nvrtc.compile(source.name, source.text, spec.arch.name, false, source.options);
  std::vector<std::string> warnings = compile_warnings(compilation.log);
  if (compilation.spill_bytes <= kTolerableSpillBytes)
    std::erase_if(warnings,
                  [](const std::string& w) { return w.find("C75") == std::string::npos; });
  if (!warnings.empty() && !allow_spills) {
    std::string what = source.name + " compiles for " + std::string(spec.arch.name) +
                       ", but is not usable: a defect of its tile configuration (" +
                       to_string(spec.tile) +
                       "). Please report it with this text and the output of 'sagebwd doctor', as "
                       "CONTRIBUTING.md says. SAGEBWD_ALLOW_SPILLS=1 runs it all the same.";
    for (const std::string& warning : warnings)
      what += "\n  " + warning;
    throw CompileError(what, compilation.log, number_lines(source.text));
  }

  CacheEntry entry;
  entry.kernel_name = source.name;
  entry.arch = spec.arch.name;
  entry.compiler = nvrtc.identity();
  entry.lowest_driver = std::max(1000 * nvrtc.version_major(), spec.arch.first_cuda);
  entry.registers = compilation.registers;
  entry.spill_bytes = compilation.spill_bytes;
  entry.shared_bytes = compilation.static_shared_bytes + source.shared_bytes;
  entry.compile_ms = compilation.compile_ms;
  entry.cubin = std::move(compilation.cubin);
  return {std::move(entry), /*keep=*/warnings.empty()};
}

} // namespace sagebwd
