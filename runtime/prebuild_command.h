//===- prebuild_command.h - How to get a kernel into a pack ---------------===//
#pragma once

#include "generator/kernel.h"

#include <string>

namespace sagebwd {

/// The command whose pack holds every kernel of an operation, e.g. "sagebwd prebuild --arch sm_90a
/// --spec 'd128 bf16 ...' --out FILE"; `tuned`: with "--records RECORDS" as well, the tuning
/// records that chose a tile.
std::string prebuild_command(const ResolvedSpec&, const Arch&, bool tuned = false);
/// The same for one kernel.
std::string prebuild_command(const KernelSpec&);

} // namespace sagebwd
