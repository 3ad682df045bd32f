//===- prebuild_command.h - The command that puts a kernel into a pack ----===//
#pragma once

#include "generator/kernel.h"

#include <string>

namespace sagebwd {

/// The command whose pack has every kernel of an operation, e.g. "sagebwd prebuild --arch sm_90a
/// --spec 'd128 bf16 ...' --out FILE". If `tuned`, the command also has "--records RECORDS", which
/// stands for the tuning records that chose a tile.
std::string prebuild_command(const ResolvedSpec&, const Arch&, bool tuned = false);

} // namespace sagebwd
