//===- space.h - The tiles that can be built -------------------------------===//
//
// What a kernel's tiles may be on an architecture, by formulas alone: nothing is compiled. Which of
// them a kernel has by default, choice.h says.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/kernel.h"

#include <string>
#include <vector>

namespace sagebwd {

// Specs are resolved here, or a kernel's own.

/// Bytes behind all else, in which a block of packed sequences notes which sequence it works on.
inline constexpr int kPlaceBytes = 32;
/// Dynamic shared memory of a kernel with this tile.
int shared_bytes(KernelKind, const AttentionSpec&, const TileConfig&);
/// Whether an SM has the shared memory of the tile's `blocks_per_sm` blocks.
bool shares_memory(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);
/// Why a kernel's tile cannot be built, or empty.
std::string objection(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);
/// Raises SpecError where a kernel's tile cannot be built, and says why.
void check_tile(const KernelSpec&);

/// Whether a family builds a kernel, on an architecture that has the family.
bool builds(KernelKind, const AttentionSpec&, Family);
/// A tile of blocks with so many warps that multiply; it may be one that cannot be built.
TileConfig tile_with(KernelKind, const AttentionSpec&, Family, int warps, int stages,
                     int blocks_per_sm);
/// Every tile that can be built and whose threads, registers and shared memory let `blocks_per_sm`
/// blocks live on one SM, of every family there is, in a fixed order.
std::vector<TileConfig> tiles_that_fit(KernelKind, const AttentionSpec&, const Arch&);
/// Whether two tiles differ only in how many blocks of the same code live on an SM.
bool same_code(const TileConfig&, const TileConfig&, const Arch&);

} // namespace sagebwd
