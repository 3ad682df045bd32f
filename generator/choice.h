//===- choice.h - The tiles of kernels that nobody named one for -----------===//
//
// What is fastest where it was measured, as far as it can be built. A tuner looks for better ones
// among tiles_worth_trying().
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/space.h"

#include <optional>

namespace sagebwd {

// Specs are resolved here, or a kernel's own.

/// A kernel's default tile; default-made for a kernel without tiles. Raises SpecError where none
/// fits.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&);
/// The default tile of one family.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&, Family);
/// The tile of KernelKind::backward where one kernel forms all gradients by default: the spec
/// allows it, the family has it, and it is faster. Of the GPU's own family, or of the one named.
std::optional<TileConfig> default_fused_tile(const AttentionSpec&, const Arch&);
std::optional<TileConfig> default_fused_tile(const AttentionSpec&, const Arch&, Family);
/// The default tiles of one family, for all kernels that have tiles; of a kernel that it does not
/// build, those of the GPU's own. KernelKind::backward is among them where it is the default.
Tiles default_tiles(const ResolvedSpec&, const Arch&, Family);
bool has_default_tile(const KernelSpec&);

/// Tiles for a tuner to compare: the default first, then every other that fits, has other code and
/// may take its place. Empty for kernels without a tile; raises SpecError where not even a default
/// fits.
std::vector<TileConfig> tiles_worth_trying(KernelKind, const ResolvedSpec&, const Arch&);
/// Why a tile must not take the default's place, or empty: it cannot be built, or it would change
/// bits of a `deterministic` operation. Integer products sum exactly, so that every tile gives the
/// same bits. Sums of 16-bit products follow the order of the matrix instruction, which is the same
/// within a family.
std::string objection_to_trying(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);

} // namespace sagebwd
