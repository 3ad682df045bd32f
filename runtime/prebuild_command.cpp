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
  // Not every kernel of a backward depends on what decides which backward it is, but the operation
  // must name it.
  if (definition_of(kernel.kind).of == Backward::fused) {
    spec.gradient_kernels = Backward::fused;
    // round_dq depends on no precision. On GPUs of 99 KB the widest fused kernel is that of INT8.
    if (kernel.kind == KernelKind::round_dq && !sums_dq_in_fp16(spec) && spec.group_kv == 128 &&
        !grouping_of(spec.granularity).one_scale)
      spec.precision = Precision::six_of_seven;
    spec.deterministic &= orders_dq(spec);
  } else if (kernel.pass == Pass::backward && !is_fused(spec) &&
             default_fused_tile(spec, kernel.arch)) {
    spec.gradient_kernels = Backward::split;
  }
  return prebuild_command(resolved(spec), kernel.arch, !has_default_tile(kernel));
}

} // namespace sagebwd
