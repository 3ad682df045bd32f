//===- prebuild_command.cpp - How to get a kernel into a pack --------------===//

#include "runtime/prebuild_command.h"

namespace sagebwd {

namespace {

/// On some GPUs the shared memory holds a forward's tiles but not its backward's.
bool can_be_built(Pass pass, const AttentionSpec& spec, const Arch& arch) {
  try {
    kernels_of(pass, spec, arch);
    return true;
  } catch (const SpecError&) {
    return false;
  }
}

std::string command(const AttentionSpec& spec, const Arch& arch, const std::string& more) {
  const AttentionSpec given = resolved(spec, arch);
  AttentionSpec plain = given;
  plain.group_q = plain.group_kv = 0;
  plain = resolved(plain, arch);

  std::string text = "sagebwd prebuild";
  auto add = [&](const std::string& option, std::string_view value) {
    text += " --" + option + " " + std::string(value);
  };
  add("arch", arch.name);
  add("head-dim", std::to_string(given.head_dim));
  add("dtype", to_string(given.dtype));
  add("causal", to_string(given.causal));
  if (given.granularity != AttentionSpec().granularity)
    add("granularity", to_string(given.granularity));
  if (given.precision != AttentionSpec().precision)
    add("precision", to_string(given.precision));
  if (given.group_q != plain.group_q)
    add("group-q", std::to_string(given.group_q));
  if (given.group_kv != plain.group_kv)
    add("group-kv", std::to_string(given.group_kv));
  if (!given.smooth_k)
    text += " --no-smooth-k";
  // Under qk16 nothing is rotated, whatever a spec says: its kernels are the same.
  if (!given.rotate && given.precision != Precision::qk16)
    text += " --no-rotate";
  if (!can_be_built(Pass::backward, given, arch))
    add("pass", to_string(Pass::forward));
  return text + more + " --out FILE";
}

} // namespace

std::string prebuild_command(const AttentionSpec& spec, const Arch& arch) {
  return command(spec, arch, "");
}

std::string prebuild_command(const KernelSpec& kernel) {
  bool tuned = true;
  try {
    tuned = !(kernel.tile == default_tile(kernel.kind, kernel.attention, kernel.arch));
  } catch (const SpecError&) {
    // There is no default: only a record can have chosen this one.
  }
  return command(kernel.attention, kernel.arch, tuned ? " --records RECORDS" : "");
}

} // namespace sagebwd
