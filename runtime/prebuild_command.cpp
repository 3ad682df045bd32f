//===- prebuild_command.cpp - How to get a kernel into a pack --------------===//

#include "runtime/prebuild_command.h"
#include "generator/space.h"

namespace sagebwd {

namespace {

/// On some GPUs the shared memory holds a forward's tiles but not its backward's.
bool can_be_built(Pass pass, const ResolvedSpec& spec, const Arch& arch) {
  try {
    kernels_of(pass, spec, arch);
    return true;
  } catch (const SpecError&) {
    return false;
  }
}

} // namespace

std::string prebuild_command(const ResolvedSpec& spec, const Arch& arch, bool tuned) {
  std::string text =
      "sagebwd prebuild --arch " + std::string(arch.name) + " --spec '" + to_string(*spec) + "'";
  if (!can_be_built(Pass::backward, spec, arch))
    text += " --pass " + std::string(to_string(Pass::forward));
  return text + (tuned ? " --records RECORDS" : "") + " --out FILE";
}

std::string prebuild_command(const KernelSpec& kernel) {
  return prebuild_command(resolved(kernel.attention, kernel.arch), kernel.arch,
                          !has_default_tile(kernel));
}

} // namespace sagebwd
