//===- prebuild_command.cpp - The command that puts a kernel into a pack --===//

#include "runtime/prebuild_command.h"
#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/operation.h"
#include "generator/space.h"

namespace sagebwd {

std::string prebuild_command(const ResolvedSpec& spec, const Arch& arch, bool tuned) {
  const std::string text =
      "sagebwd prebuild --arch " + std::string(arch.name) + " --spec '" + to_string(*spec) + "'";
  bool has_backward = true;
  try {
    Operation(spec, arch).kernels(Pass::backward);
  } catch (const SpecError&) { // wide heads: a backward does not fit every GPU
    has_backward = false;
  }
  return text + (has_backward ? "" : " --pass forward") + (tuned ? " --records RECORDS" : "") +
         " --out FILE";
}

std::string prebuild_command(const KernelSpec& kernel) {
  AttentionSpec spec = kernel.attention;
  if (kernel.channels == Channels::part) // any width that is not full
    spec.head_dim -= kHeadDimStep;
  // Not every kernel of a fused backward depends on `deterministic`, but the operation must name
  // it.
  spec.deterministic &= definition_of(kernel.kind).of != Backward::fused;
  return prebuild_command(resolved(spec), kernel.arch, !has_default_tile(kernel));
}

} // namespace sagebwd
