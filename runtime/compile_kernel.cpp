//===- compile_kernel.cpp - From a kernel's source to its cache entry -----===//

#include "runtime/compile_kernel.h"
#include "generator/choice.h"
#include "generator/definition.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"

#include <algorithm>

namespace sagebwd {

namespace {

/// The most bytes of spill stores and loads of a thread that are accepted. Kernels are laid out to
/// have none with the NVRTC that the tests use. Another version's ptxas may need a few, which cost
/// too little to refuse the kernel. Every listing shows them.
constexpr int kTolerableSpillBytes = 128;
/// Of kernels with a caller's expression, whose registers nobody has laid out: they only take
/// longer.
constexpr int kTolerableWithExpression = 1024;

/// Says what is wrong, and what to do. Only default tiles are known to have enough registers.
std::string advice_against(const KernelSpec& spec) {
  const std::string tile = "'" + to_string(spec.tile) + "'";
  if (!definition_of(spec.kind).tiling || has_default_tile(spec))
    return "a defect of its tile configuration (" + tile +
           "). Please report it with this text and the output of 'sagebwd doctor', as "
           "CONTRIBUTING.md says.";
  return "with the tile " + tile +
         " the registers of a thread do not suffice. Take one with fewer blocks per SM, or leave "
         "it out for the default.";
}

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
  const bool has_expression = has_score(spec.attention) || !spec.attention.mask.empty();
  if (compilation.spill_bytes <= (has_expression ? kTolerableWithExpression : kTolerableSpillBytes))
    std::erase_if(warnings,
                  [](const std::string& w) { return w.find("C75") == std::string::npos; });
  if (!warnings.empty() && !allow_spills) {
    std::string what = source.name + " compiles for " + std::string(spec.arch.name) +
                       ", but is not usable: " + advice_against(spec) +
                       " SAGEBWD_ALLOW_SPILLS=1 runs it all the same.";
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
