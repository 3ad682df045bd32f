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

/// Why a tile must not take the default's place, or empty: it cannot be built, or it would change
/// bits of a `deterministic` operation. Integer products sum exactly, so that every tile gives the
/// same bits; sums of 16-bit products follow the order of the matrix instruction, which is one
/// within a family. The spec must be resolved.
std::string objection_to_trying(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);

} // namespace sagebwd
