//===- space.h - The tiles that can be built, and those worth trying -------===//
#pragma once

#include "generator/kernel.h"

#include <optional>
#include <string>
#include <vector>

namespace sagebwd {

// Specs are resolved here, or a kernel's own.

/// In which a block of packed sequences notes whose it is, behind all else.
inline constexpr int kPlaceBytes = 32;
/// Dynamic shared memory of a kernel with this tile.
int shared_bytes(KernelKind, const AttentionSpec&, const TileConfig&);
/// Why a kernel's tile cannot be built, or empty.
std::string objection(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);
/// Raises SpecError where a kernel's tile cannot be built, and says why.
void check_tile(const KernelSpec&);

/// A sound tile for a kernel on an architecture, without tuning; default-made for a kernel without
/// tiles. Raises SpecError where none fits.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&);
/// The same of one family, and those of all kernels that have tiles.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&, Family);
/// A fused backward's among them where that is the default.
Tiles default_tiles(const ResolvedSpec&, const Arch&, Family);
/// The fused backward's, where one kernel forms all gradients unless tiles say otherwise: where the
/// spec allows it, the family has it, and it is faster. Of one family, or of the GPU's own.
std::optional<TileConfig> default_fused_tile(const AttentionSpec&, const Arch&, Family);
std::optional<TileConfig> default_fused_tile(const AttentionSpec&, const Arch&);
bool has_default_tile(const KernelSpec&);

/// Every tile that can be built for an attention kernel on an architecture and whose threads,
/// registers and shared memory let `blocks_per_sm` blocks live on one SM, of every family there is;
/// the default first, the others in a fixed order. By formulas alone: nothing is compiled. Empty
/// for kernels without a tile; raises SpecError where not even a default fits.
std::vector<TileConfig> tiles_worth_trying(KernelKind, const ResolvedSpec&, const Arch&);

/// Why a tile must not take the default's place, or empty: it cannot be built, or it would change
/// bits of a `deterministic` operation. Integer products sum exactly, so that every tile gives the
/// same bits; sums of 16-bit products follow the order of the matrix instruction, which is one
/// within a family.
std::string objection_to_trying(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);

} // namespace sagebwd
