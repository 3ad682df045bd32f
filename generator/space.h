//===- space.h - The tiles that can be built -------------------------------===//
//
// Formulas decide which tiles a kernel can have on an architecture; nothing is compiled for that.
// choice.h chooses the default tile among them.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/kernel.h"

#include <string>
#include <vector>

namespace sagebwd {

// Every AttentionSpec here is resolved, or is the spec of a KernelSpec.

/// Bytes at the end of shared memory, in which a block stores which packed sequence it works on.
inline constexpr int kPlaceBytes = 32;
/// The bytes of dynamic shared memory of a kernel with this tile, or of any kernel.
int shared_bytes(KernelKind, const AttentionSpec&, const TileConfig&);
int shared_bytes(const KernelSpec&);
/// Whether an SM has enough shared memory for `blocks_per_sm` blocks of the tile.
bool shares_memory(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);
/// Why a kernel cannot be built with a tile; empty if it can.
std::string objection(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);
/// Raises SpecError with the objection if a kernel cannot be built with its tile.
void check_tile(const KernelSpec&);

/// Whether a family builds a kernel of this spec, on an architecture that has the family.
bool builds(KernelKind, const AttentionSpec&, Family);
/// The tile with these numbers of multiplying warps, stages and blocks. objection() says whether it
/// can be built.
TileConfig tile_with(KernelKind, const AttentionSpec&, Family, int warps, int stages,
                     int blocks_per_sm);
/// The tile `first`, and then every other tile, of every family, that can be built, whose threads,
/// registers and shared memory let `blocks_per_sm` blocks live on one SM, and that has machine code
/// of its own. The order is fixed.
std::vector<TileConfig> tiles_that_fit(KernelKind, const AttentionSpec&, const Arch&,
                                       const TileConfig& first);

} // namespace sagebwd
