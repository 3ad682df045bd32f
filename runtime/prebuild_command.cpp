//===- prebuild_command.cpp - The command that puts a kernel into a pack --===//

#include "runtime/prebuild_command.h"
#include "generator/operation.h"

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

} // namespace sagebwd
