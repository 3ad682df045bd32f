//===- prebuild_command.h - How to get a kernel into a pack ----------------===//
#pragma once

#include "generator/kernel.h"

#include <string>

namespace sagebwd {

/// The command whose pack holds every kernel of an operation, or whatever kernel has this spec,
/// e.g. "sagebwd prebuild --arch sm_90a --head-dim 128 --dtype bf16 --causal none --out FILE".
/// Options that have their default value are left out but for those four.
std::string prebuild_command(const AttentionSpec&, const Arch&);
/// The same for one kernel; where its tile is not the default one, with "--records RECORDS", the
/// tuning records that chose it.
std::string prebuild_command(const KernelSpec&);

} // namespace sagebwd
