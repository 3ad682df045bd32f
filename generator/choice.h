//===- choice.h - Default tiles, and tiles for a tuner ---------------------===//
//
// A kernel for which nobody chose a tile has its default tile: the fastest tile that can be built,
// according to measurements. A tuner compares the default tile with tiles_worth_trying().
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/space.h"

#include <optional>

namespace sagebwd {

// Every AttentionSpec here is resolved, or is the spec of a KernelSpec.

/// A kernel's default tile. A kernel without tiles has TileConfig(). Raises SpecError if no tile
/// fits.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&);
/// The default tile of one family.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&, Family);
/// The tile of KernelKind::backward if by default one kernel forms all gradients; nothing if the
/// backward is split. One kernel forms all gradients if the spec allows that, the family has such a
/// kernel, and such a kernel is faster. The first function takes the GPU's preferred family; of a
/// spec that asks for one kernel any family will do, and it raises SpecError if no tile fits.
std::optional<TileConfig> default_fused_tile(const AttentionSpec&, const Arch&);
std::optional<TileConfig> default_fused_tile(const AttentionSpec&, const Arch&, Family);
/// The default tiles of one family for all kernels that have tiles. If the family does not build a
/// kernel, the kernel has a tile of the GPU's preferred family. The result has a tile for
/// KernelKind::backward if default_fused_tile() has one.
Tiles default_tiles(const ResolvedSpec&, const Arch&, Family);
bool has_default_tile(const KernelSpec&);
/// How default tiles of an architecture were found: "measured", "predicted" by a model of the GPU,
/// or "not measured".
std::string origin_of_default_tiles(const Arch&);
/// A sentence about it for people.
std::string origin_in_words(const Arch&);

/// Tiles for a tuner to compare: first the default tile, then every other tile that fits, has
/// different code and may replace the default tile. Empty for kernels without tiles. Raises
/// SpecError if no tile fits at all.
std::vector<TileConfig> tiles_worth_trying(KernelKind, const ResolvedSpec&, const Arch&);
/// Why a tile must not replace the default tile; empty if it may. A tile that cannot be built must
/// not, nor a tile that would change bits of a `deterministic` operation. Sums of integer products
/// are exact, so that every tile gives the same bits. Sums of 16-bit products depend on the order
/// in which the matrix instruction adds, which is the same for all tiles of a family.
std::string objection_to_trying(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);

/// All that a tuner of one kernel needs from the generator.
struct TileContest {
  KernelKind kind;
  std::vector<TileConfig> tiles; ///< those that compete; the first is the default tile
  /// To each of the tiles that the tuner's caller named: why it does not compete, or empty.
  std::vector<std::string> objections;
  /// The operation's kernels of both passes, in launch order, up to this one, with default tiles.
  std::vector<KernelSpec> operation;
};
/// The contest of tiles_worth_trying() or, if tiles are named, of these and the default tile.
/// Operation::contests() fills in the operation.
TileContest tile_contest(KernelKind, const ResolvedSpec&, const Arch&,
                         const std::vector<TileConfig>& named);

} // namespace sagebwd
