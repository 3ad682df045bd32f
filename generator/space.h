//===- space.h - The tiles worth trying ------------------------------------===//
#pragma once

#include "generator/kernel.h"

#include <string>
#include <vector>

namespace sagebwd {

/// Every tile that can be built for an attention kernel on an architecture and whose threads,
/// registers and shared memory let `blocks_per_sm` blocks live on one SM, of every family there is;
/// the default first, the others in a fixed order. By formulas alone: nothing is compiled. Empty
/// for kernels without a tile; raises SpecError where not even a default fits.
std::vector<TileConfig> tiles_worth_trying(KernelKind, const AttentionSpec&, const Arch&);

} // namespace sagebwd
