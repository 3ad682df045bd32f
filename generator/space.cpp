//===- space.cpp - The tiles that can be built, and those worth trying -----===//

#include "generator/space.h"

#include "generator/definition.h"

#include <algorithm>

namespace sagebwd {
namespace {

/// An SM holds what one block may use at most, and this much that the system takes of every block.
constexpr int kReservedBytes = 1024;
constexpr int kMostRegisters = 255; ///< of one thread
/// Registers are given to warps in units of this many a thread.
constexpr int kRegisterUnit = 8;
/// Registers that no thread goes without: addresses, the row's scales, the loop.
constexpr int kOtherRegisters = 16;

constexpr int kMostBlocks = 8; ///< on an SM that a tile may ask for

int registers_for(const TileConfig& t, const Arch& arch) {
  const int share = arch.registers_per_sm / (32 * t.warps * t.blocks_per_sm);
  return std::min(share / kRegisterUnit * kRegisterUnit, kMostRegisters);
}

/// Whether an SM has the shared memory of `blocks_per_sm` blocks.
bool shares_memory(KernelKind kind, const AttentionSpec& s, const TileConfig& t, const Arch& arch) {
  const int block_bytes = shared_bytes(kind, s, t) + kReservedBytes;
  return t.blocks_per_sm * block_bytes <= arch.max_shared_bytes + kReservedBytes;
}

/// Whether `blocks_per_sm` blocks can live on one SM. Its limit of threads (1536 or more) is met by
/// whatever meets that of registers.
bool lives(KernelKind kind, const AttentionSpec& s, const TileConfig& t, const Arch& arch) {
  return shares_memory(kind, s, t, arch) &&
         registers_for(t, arch) >=
             tiling_of(kind, t.family).accumulators(s, t.family) + kOtherRegisters;
}

/// Residency reaches a kernel's code only as the registers it may use.
bool same_code(const TileConfig& a, const TileConfig& b, const Arch& arch) {
  TileConfig other = b;
  other.blocks_per_sm = a.blocks_per_sm;
  return a == other && registers_for(a, arch) == registers_for(b, arch);
}

/// The tile of a kernel whose blocks have so many warps.
TileConfig tile_of(const Tiling& tiling, const AttentionSpec& s, Family family, int warps,
                   int stages, int blocks_per_sm) {
  const bool keys = tiling.blocks_own_keys;
  const int owned = tiling.tokens_a_warp * warps;
  return {.family = family,
          .block_q = keys ? kTokensPerTile : owned,
          .block_kv = keys ? owned : s.group_kv,
          .warps = warps,
          .stages = stages,
          .blocks_per_sm = blocks_per_sm};
}

bool contains(const std::vector<int>& values, int value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// Why a family builds no kernel of a spec, or empty.
std::string objection_of_family(const AttentionSpec& s, Family family) {
  return s.smooth_q && family != Family::mma
             ? "smooth_q is built by the family '" + value_text(Family::mma) + "' alone"
             : "";
}

/// Whether a family builds a kernel: of the warp-specialised ones not every spec's is.
bool builds(KernelKind kind, const AttentionSpec& s, Family family) {
  const std::vector<Family> families = families_of(kind);
  if (std::find(families.begin(), families.end(), family) == families.end() ||
      !objection_of_family(s, family).empty())
    return false;
  const Tiling& tiling = tiling_of(kind, family);
  return !warp_specialised(family) || tiling.objection(s, tiling.preferred(s, family)).empty();
}

/// The family of a kernel's default tile: of those that build it, what its GPU is fastest with.
Family preferred_family(KernelKind kind, const AttentionSpec& s, const Arch& arch) {
  if (arch.name != "sm_90a")
    return Family::mma;
  for (Family family : {Family::pair, Family::ws})
    if (builds(kind, s, family) && tiling_of(kind, family).beats_wgmma(s))
      return family;
  return objection_of_family(s, Family::wgmma).empty() ? Family::wgmma : Family::mma;
}

TileConfig preferred_tile(const Tiling& tiling, const AttentionSpec& s, Family family) {
  const TileConfig t = tiling.preferred(s, family);
  return tile_of(tiling, s, family, t.warps, t.stages, t.blocks_per_sm);
}

/// Tokens that take the same steps of a walk.
int tokens_a_walk(KernelKind kind, const TileConfig& t) {
  const Tiling& tiling = tiling_of(kind, t.family);
  return tiling.warpgroups_walk_alone ? 64 : tiling.blocks_own_keys ? t.block_kv : t.block_q;
}

/// Whether the walks of two tiles form sums in the same order. A mask makes a walk that of the
/// tokens it is for: where it begins and ends, in which order masked groups come, and which units
/// of channels sums pass through. Edges of `top_left` lie between tokens of the same number, so
/// that those of 64 and of 128 fall into the same groups of 128, and into the same units.
bool same_steps(KernelKind kind, const AttentionSpec& s, const TileConfig& a, const TileConfig& b) {
  constexpr int kBoth = 128; // what is copied and scaled together is a multiple of it
  const int of_a = tokens_a_walk(kind, a), of_b = tokens_a_walk(kind, b);
  if (of_a == of_b || !(bounded_behind(s) || bounded_before(s)))
    return true;
  const bool diagonal =
      s.causal == Causal::top_left && s.window_left == kNoWindow && s.window_right == kNoWindow;
  const bool in_groups =
      kind != KernelKind::backward_dq || (which_int8(s.precision).dq && s.group_kv == kBoth);
  return diagonal && in_groups && kBoth % of_a == 0 && kBoth % of_b == 0;
}

/// Why a tile's results may differ from another's by the order of sums; empty where they may not.
std::string objection_to_order(KernelKind kind, const AttentionSpec& s, const TileConfig& tile,
                               const TileConfig& by_default) {
  const std::string must = ": under 'deterministic' results must not change by a bit";
  const std::string family(to_string(tile.family)), other(to_string(by_default.family));
  if (tile.family != by_default.family && tiling_of(kind).sums_16_bit_products(s))
    return family + " sums 16-bit products in another order than " + other +
           ", the default's family" + must;
  if ((tile.family == Family::mma) != (by_default.family == Family::mma))
    return family + " rounds sums of INT8 products at other places than " + other +
           ", the default's family" + must;
  if (!same_steps(kind, s, tile, by_default))
    return "under a mask " + std::to_string(tokens_a_walk(kind, tile)) +
           " tokens are summed for in other steps than the default's " +
           std::to_string(tokens_a_walk(kind, by_default)) + must;
  return "";
}

std::string quoted(const TileConfig& tile) { return "'" + to_string(tile) + "'"; }

} // namespace

int shared_bytes(KernelKind kind, const AttentionSpec& s, const TileConfig& tile) {
  const Tiling* tiling = definition_of(kind, tile.family).tiling;
  return (tiling ? tiling->shared_bytes(s, tile) : 0) + (s.packed ? kPlaceBytes : 0);
}

std::string objection(KernelKind kind, const AttentionSpec& s, const TileConfig& t,
                      const Arch& arch) {
  const Tiling& tiling = tiling_of(kind, t.family);
  const bool keys = tiling.blocks_own_keys;
  const int walked = keys ? kTokensPerTile : s.group_kv, rows = keys ? t.block_kv : t.block_q;
  if (t.family != Family::mma && arch.name != "sm_90a")
    return "wgmma exists on sm_90a alone; elsewhere the family is mma";
  if (!contains(tiling.warps, t.warps) || rows != tiling.tokens_a_warp * t.warps) {
    const auto rows_of = [&](int warps) { return std::to_string(tiling.tokens_a_warp * warps); };
    std::string known = rows_of(tiling.warps[0]) + (keys ? " keys" : " queries") + " with " +
                        std::to_string(tiling.warps[0]) + " warps";
    for (size_t i = 1; i < tiling.warps.size(); ++i)
      known += " or " + rows_of(tiling.warps[i]) + " with " + std::to_string(tiling.warps[i]);
    return "a block takes " + known;
  }
  if ((keys ? t.block_q : t.block_kv) != walked)
    return "this kernel walks over " + std::to_string(walked) + (keys ? " queries" : " keys") +
           " at a time";
  if (!contains(tiling.stages, t.stages)) {
    std::string known;
    for (int stages : tiling.stages)
      known += (known.empty() ? "" : " or ") + std::to_string(stages);
    return known + " stages are supported";
  }
  if (t.blocks_per_sm < 1 || t.blocks_per_sm > kMostBlocks)
    return "1 to " + std::to_string(kMostBlocks) + " blocks per SM are supported";
  if (std::string why = objection_of_family(s, t.family); !why.empty())
    return why;
  if (std::string why = tiling.objection(s, t); !why.empty())
    return why;
  if (const int bytes = shared_bytes(kind, s, t); bytes > arch.max_shared_bytes)
    return "it needs " + std::to_string(bytes) + " bytes of shared memory and " +
           std::string(arch.name) + " has " + std::to_string(arch.max_shared_bytes) + " per block";
  return "";
}

void check_tile(const KernelSpec& k) {
  if (!definition_of(k.kind).tiling)
    return;
  if (const std::string why = objection(k.kind, k.attention, k.tile, k.arch); !why.empty())
    throw SpecError("tile " + quoted(k.tile) + " does not suit " + std::string(to_string(k.kind)) +
                    " of " + to_string(k.attention) + " on " + std::string(k.arch.name) + ": " +
                    why);
}

TileConfig default_tile(KernelKind kind, const AttentionSpec& s, const Arch& arch) {
  return default_tile(kind, s, arch, preferred_family(kind, s, arch));
}

Tiles default_tiles(const ResolvedSpec& spec, const Arch& arch, Family family) {
  Tiles tiles;
  for (KernelKind kind : tiled_kernels())
    tiles[kind] = default_tile(
        kind, spec, arch, builds(kind, spec, family) ? family : preferred_family(kind, spec, arch));
  if (const auto fused = default_fused_tile(spec, arch, family))
    tiles[KernelKind::backward] = *fused;
  return tiles;
}

std::optional<TileConfig> default_fused_tile(const AttentionSpec& s, const Arch& arch,
                                             Family family) {
  constexpr KernelKind kind = KernelKind::backward;
  const std::vector<Family> families = families_of(kind);
  if (!may_fuse_backward(s) ||
      std::find(families.begin(), families.end(), family) == families.end())
    return std::nullopt;
  // In INT8 a block takes 128 keys. On an H200, ms beside the split one's: at 64 channels 21.8 and
  // 22.0 with two stages, 22.3 with one; at 128 18.2 and 20.8, 18.5 with two. It spills beside dV
  // in 16 bits; at 64 channels on sm_80 and sm_90a and beside S in 16 bits; at 128 on Blackwells
  // and sm_87, and beside S in 16 bits on sm_90a.
  const Int8Products int8 = which_int8(s.precision);
  const bool wide = width(s) > 64, blackwell = arch.major >= 10;
  const bool spills = wide ? blackwell || arch.name == "sm_87" || (!int8.s && arch.name == "sm_90a")
                           : !int8.s || arch.name == "sm_80" || arch.name == "sm_90a";
  if (int8.dq && (!int8.dv || spills))
    return std::nullopt;
  // In 16 bits two small blocks an SM hide each other's waits: 18.8 and 18.5 ms at 64 and 128
  // channels; one large 19.7 and 19.5; a second stage 20.3 and 24.1; the split one 22.2 and 21.5.
  // At 128 channels Blackwells spill small ones.
  const Tiling& tiling = tiling_of(kind, family);
  if (family == Family::ws) {
    // Warp-specialised the split one is the faster at 64 channels: 16.7 ms for 17.4, the forward
    // included. It has no sums in FP16, and is wgmma's where dS has one scale a block.
    if (!wide && !sums_dq_in_fp16(s) && !grouping_of(s.granularity).one_scale)
      return std::nullopt;
    const TileConfig tile = preferred_tile(tiling, s, family);
    return objection(kind, s, tile, arch).empty() ? std::optional(tile) : std::nullopt;
  }
  std::vector<TileConfig> tiles = {tile_of(tiling, s, family, 8, int8.dq && !wide ? 2 : 1, 1)};
  if (!int8.dq && !(wide && blackwell))
    tiles.insert(tiles.begin(), tile_of(tiling, s, family, 4, 1, 2));
  for (const TileConfig& tile : tiles)
    if (objection(kind, s, tile, arch).empty() && shares_memory(kind, s, tile, arch))
      return tile;
  return std::nullopt;
}

std::optional<TileConfig> default_fused_tile(const AttentionSpec& s, const Arch& arch) {
  return default_fused_tile(s, arch, preferred_family(KernelKind::backward, s, arch));
}

TileConfig default_tile(KernelKind kind, const AttentionSpec& s, const Arch& arch, Family family) {
  const Tiling* tiling = definition_of(kind, family).tiling;
  if (!tiling)
    return {};
  if (kind == KernelKind::backward)
    if (const auto fused = default_fused_tile(s, arch, family))
      return *fused;
  // Small blocks, several to an SM, hide each other's waits: tuned on an H200 they beat larger
  // blocks. As many as the registers allow without spills, and a second stage where both then fit.
  // Where shared memory allows but one of them, a larger block brings as many warps.
  const TileConfig preferred = tiling->preferred(s, family);
  if (warp_specialised(family))
    return preferred_tile(*tiling, s, family);
  const auto small = [&](int stages) {
    return tile_of(*tiling, s, family, 4, stages, preferred.blocks_per_sm);
  };
  const int blocks = family == Family::wgmma && width(s) <= 64 ? 2 : 1;
  const auto large = [&](int stages) { return tile_of(*tiling, s, family, 8, stages, blocks); };
  const auto builds = [&](const TileConfig& tile) {
    return objection(kind, s, tile, arch).empty();
  };
  for (const TileConfig& tile :
       {small(preferred.stages), small(1), large(preferred.stages), large(1)})
    if (builds(tile) && shares_memory(kind, s, tile, arch))
      return tile;
  for (const TileConfig& tile : {small(2), small(1)}) // one block has the SM to itself
    if (builds(tile))
      return tile;
  // The least that only memory forbids.
  const TileConfig tile = tiling->objection(s, small(1)).empty() ? small(1) : large(1);
  const std::string none = "no tile of " + std::string(to_string(kind)) + " fits " + to_string(s) +
                           " on " + std::string(arch.name) + ": ";
  if (const std::string why = tiling->objection(s, tile); !why.empty())
    throw SpecError(none + why);
  throw SpecError(
      none + "for " + quoted(tile) + ", " + objection(kind, s, tile, arch) + "; take " +
      (width(s) > kWidestFused
           ? "a GPU with more of it (A100, H100 and B200 have)" +
                 std::string(
                     tiling->pass == Pass::backward
                         ? ", or the forward pass alone (sagebwd prebuild --pass forward; in "
                           "Python backward=False)"
                         : "")
           : std::string(grouping_of(s.granularity).one_scale ? "'row'" : "group_kv = 64") +
                 ", another GPU, or precision six-of-seven"));
}

bool has_default_tile(const KernelSpec& k) {
  try {
    return k.tile == default_tile(k.kind, k.attention, k.arch);
  } catch (const SpecError&) {
    return false; // there is none: only a record can have chosen this one
  }
}

std::string objection_to_trying(KernelKind kind, const AttentionSpec& s, const TileConfig& tile,
                                const Arch& arch) {
  if (std::string why = objection(kind, s, tile, arch); !why.empty())
    return why;
  return s.deterministic ? objection_to_order(kind, s, tile, default_tile(kind, s, arch)) : "";
}

std::vector<TileConfig> tiles_worth_trying(KernelKind kind, const ResolvedSpec& spec,
                                           const Arch& arch) {
  if (!definition_of(kind).tiling)
    return {};
  std::vector<TileConfig> tiles = {default_tile(kind, spec, arch)};
  for (Family family : families_of(kind))
    for (int warps : tiling_of(kind, family).warps)
      for (int stages : tiling_of(kind, family).stages)
        for (int blocks = kMostBlocks; blocks >= 1; --blocks) { // of equal ones, the most that fit
          const TileConfig tile =
              tile_of(tiling_of(kind, family), spec, family, warps, stages, blocks);
          if (objection_to_trying(kind, spec, tile, arch).empty() &&
              lives(kind, spec, tile, arch) &&
              std::none_of(tiles.begin(), tiles.end(),
                           [&](const TileConfig& known) { return same_code(known, tile, arch); }))
            tiles.push_back(tile);
        }
  return tiles;
}

} // namespace sagebwd
