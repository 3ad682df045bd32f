//===- space.cpp - The tiles that can be built -----------------------------===//

#include "generator/space.h"

#include "generator/definition.h"

#include <algorithm>

namespace sagebwd {
namespace {

/// Bytes of shared memory that the system reserves for each block. An SM has the most that one
/// block may use, and so many bytes more.
constexpr int kReservedBytes = 1024;
constexpr int kMostRegisters = 255; ///< registers of one thread
/// Warps get registers in units of so many per thread.
constexpr int kRegisterUnit = 8;
/// Registers that every thread needs besides accumulators: addresses, the row's scales, the loop.
constexpr int kOtherRegisters = 16;
/// A walk over lists needs so many besides, so that a tile is worth trying: with fewer, kernels
/// spilled up to 972 bytes, and the build refuses more than 128
/// (tests/templates/listed_tiles_test.cpp). A thread that has as many registers as there can be has
/// no more with another tile.
constexpr int kRegistersOfLists = 32;

constexpr int kMostBlocks = 8; ///< the most blocks per SM that a tile may have

int registers_for(const TileConfig& t, const Arch& arch) {
  const int share = arch.registers_per_sm / (32 * t.warps * t.blocks_per_sm);
  return std::min(share / kRegisterUnit * kRegisterUnit, kMostRegisters);
}

/// The registers without which a thread cannot hold a tile's sums.
int registers_needed(KernelKind kind, const AttentionSpec& s, const TileConfig& t) {
  return tiling_of(kind, t.family).accumulators(s, t.family) + kOtherRegisters;
}

/// Whether `blocks_per_sm` blocks can live on one SM. A tile that meets the SM's limit of registers
/// also meets its limit of threads (1536 or more).
bool lives(KernelKind kind, const AttentionSpec& s, const TileConfig& t, const Arch& arch) {
  const int registers = registers_for(t, arch);
  const int of_lists = is_sparse(s) && registers < kMostRegisters ? kRegistersOfLists : 0;
  return shares_memory(kind, s, t, arch) && registers >= registers_needed(kind, s, t) + of_lists;
}

/// Whether two tiles give the same machine code. Such tiles can differ in `blocks_per_sm` only.
bool same_code(const TileConfig& a, const TileConfig& b, const Arch& arch) {
  // `blocks_per_sm` changes the code of a kernel only by the number of registers it may use.
  TileConfig other = b;
  other.blocks_per_sm = a.blocks_per_sm;
  return a == other && registers_for(a, arch) == registers_for(b, arch);
}

/// Why a family builds no kernel of a spec at all; empty if nothing prevents that.
std::string objection_of_family(const AttentionSpec& s, Family family) {
  if (s.smooth_q && family.instruction() != Instruction::mma)
    return "smooth_q is built by the family '" + value_text(Family::mma) + "' alone";
  if (very_wide(s) ? family.roles() != Roles::team && family.roles() != Roles::pairs
                   : family.roles() == Roles::team)
    return "heads of more than " + std::to_string(kWidestWithAll) +
           " channels are for the family '" + value_text(Family::team) + "' and, on sm_90a, '" +
           value_text(Family::pair) + "'";
  if (has_score(s) && family.roles() == Roles::pairs)
    return "the family '" + value_text(family) + "' takes no score functions";
  return "";
}

/// Why a kernel walks over no lists of such blocks with a tile; empty if the spec has none.
std::string objection_to_lists(KernelKind kind, const AttentionSpec& s, const TileConfig& t) {
  if (!is_sparse(s))
    return "";
  if (definition_of(kind, t.family).listed_fields[0].empty())
    return "the family '" + value_text(t.family) + "' of " + std::string(to_string(kind)) +
           " walks over no lists of blocks";
  const bool keys = tiling_of(kind, t.family).blocks_own_keys;
  const int rows = keys ? t.block_kv : t.block_q, block = keys ? s.sparse_kv : s.sparse_q;
  return block % rows == 0
             ? ""
             : "its " + std::to_string(rows) + (keys ? " keys" : " queries") +
                   " must lie in one of the lists' blocks of " + std::to_string(block);
}

std::string quoted(const TileConfig& tile) { return "'" + to_string(tile) + "'"; }

} // namespace

int shared_bytes(KernelKind kind, const AttentionSpec& s, const TileConfig& tile) {
  return tiling_of(kind, tile.family).shared_bytes(s, tile) + (s.packed ? kPlaceBytes : 0);
}

int shared_bytes(const KernelSpec& k) {
  const KernelDefinition& definition = definition_of(k);
  if (definition.tiling)
    return shared_bytes(k.kind, k.attention, k.tile);
  return (definition.shared_bytes ? definition.shared_bytes(k) : 0) +
         (k.attention.packed ? kPlaceBytes : 0);
}

bool shares_memory(KernelKind kind, const AttentionSpec& s, const TileConfig& t, const Arch& arch) {
  const int block_bytes = shared_bytes(kind, s, t) + kReservedBytes;
  return t.blocks_per_sm * block_bytes <= arch.max_shared_bytes + kReservedBytes;
}

std::string objection(KernelKind kind, const AttentionSpec& s, const TileConfig& t,
                      const Arch& arch) {
  const Tiling& tiling = tiling_of(kind, t.family);
  const bool keys = tiling.blocks_own_keys;
  const int walked = keys ? kTokensPerTile : s.group_kv, rows = keys ? t.block_kv : t.block_q;
  if (t.family.instruction() != Instruction::mma && !arch.has_wgmma())
    return "wgmma exists on sm_90a alone; elsewhere the family is mma";
  if (!includes(tiling.warps, t.warps) || rows != tiling.tokens_a_warp * t.warps) {
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
  if (!includes(tiling.stages, t.stages))
    return joined(tiling.stages, " or ") + " stages are supported";
  if (t.blocks_per_sm < 1 || t.blocks_per_sm > kMostBlocks)
    return "1 to " + std::to_string(kMostBlocks) + " blocks per SM are supported";
  if (std::string why = objection_of_family(s, t.family); !why.empty())
    return why;
  if (sums_dp_in_fp16(s) && tiling.pass == Pass::backward &&
      t.family.instruction() != Instruction::mma)
    return "dp_sums '" + value_text(s.dp_sums) + "' is built by the family '" +
           value_text(Family::mma) + "' alone";
  if (std::string why = objection_to_lists(kind, s, t); !why.empty())
    return why;
  if (std::string why = tiling.objection(s, t); !why.empty())
    return why;
  if (t.family.roles() != Roles::alike && t.blocks_per_sm != 1)
    return "its block shares out all registers of an SM";
  if (const int has = registers_for(t, arch), needs = registers_needed(kind, s, t); has < needs)
    return "a thread needs " + std::to_string(needs) + " registers and has " + std::to_string(has) +
           " if " + std::to_string(t.blocks_per_sm) + " blocks of " + std::to_string(t.warps) +
           " warps share an SM; take fewer blocks per SM";
  if (const int bytes = shared_bytes(kind, s, t); bytes > arch.max_shared_bytes)
    return "it needs " + std::to_string(bytes) + " bytes of shared memory and " +
           std::string(arch.name) + " has " + std::to_string(arch.max_shared_bytes) + " per block";
  return "";
}

void check_tile(const KernelSpec& k) {
  if (!definition_of(k.kind).tiling)
    return;
  if (const std::string why = objection(k.kind, k.attention, k.tile, k.arch); !why.empty())
    throw SpecError("tile ", quoted(k.tile), " does not suit ", k.kind, " of ",
                    to_string(k.attention), " on ", k.arch.name, ": ", why);
}

bool builds(KernelKind kind, const AttentionSpec& s, Family family) {
  if (!includes(families_of(kind), family) || !objection_of_family(s, family).empty())
    return false;
  if (family.roles() == Roles::alike)
    return true;
  const Tiling& tiling = tiling_of(kind, family);
  for (int warps : tiling.warps)
    for (int stages : tiling.stages) {
      const TileConfig tile = tile_with(kind, s, family, warps, stages, 1);
      if (tiling.objection(s, tile).empty() && objection_to_lists(kind, s, tile).empty())
        return true;
    }
  return false;
}

TileConfig tile_with(KernelKind kind, const AttentionSpec& s, Family family, int warps, int stages,
                     int blocks_per_sm) {
  const Tiling& tiling = tiling_of(kind, family);
  const bool keys = tiling.blocks_own_keys;
  const int owned = tiling.tokens_a_warp * warps;
  return {.family = family,
          .block_q = keys ? kTokensPerTile : owned,
          .block_kv = keys ? owned : s.group_kv,
          .warps = warps,
          .stages = stages,
          .blocks_per_sm = blocks_per_sm};
}

std::vector<TileConfig> tiles_that_fit(KernelKind kind, const AttentionSpec& s, const Arch& arch,
                                       const TileConfig& first) {
  std::vector<TileConfig> tiles = {first};
  for (Family family : families_of(kind))
    for (int warps : tiling_of(kind, family).warps)
      for (int stages : tiling_of(kind, family).stages)
        // The largest number comes first: of tiles with the same code, the first is kept.
        for (int blocks = kMostBlocks; blocks >= 1; --blocks) {
          const TileConfig tile = tile_with(kind, s, family, warps, stages, blocks);
          if (objection(kind, s, tile, arch).empty() && lives(kind, s, tile, arch) &&
              std::none_of(tiles.begin(), tiles.end(),
                           [&](const TileConfig& known) { return same_code(known, tile, arch); }))
            tiles.push_back(tile);
        }
  return tiles;
}

} // namespace sagebwd
