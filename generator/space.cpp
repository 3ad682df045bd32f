//===- space.cpp - The tiles worth trying ----------------------------------===//

#include "generator/space.h"

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

/// Values of FP32 or INT32 a thread of a kernel holds at one time: a warp's 16 rows by n columns
/// are n / 2 a thread.
int accumulators(KernelKind kind, const AttentionSpec& s, Family family) {
  const int output = s.head_dim / 2, group = s.group_kv / 2, tile = 64 / 2;
  // An 8-bit A operand takes a quarter of its columns' registers. wgmma keeps the products of a
  // whole group apart until they are scaled; mma.sync forms 16 columns at a time.
  const int products = family == Family::wgmma ? output : 8;
  switch (kind) {
  case KernelKind::forward: // O; the group's scores, then its P in 8 bits and the products
    return output + std::max(group, group / 4 + products);
  case KernelKind::backward_dq: // dQ; the group's dS and a tile's scores, then dS in 8 bits
    return output + std::max(group + tile, group / 4 + products);
  case KernelKind::backward_dkv: // dK and dV; a tile's P and dP, then dS, P in 8 bits and products
    return 2 * output + std::max(2 * tile, tile + tile / 4 + products);
  default:
    return 0;
  }
}

int registers_for(const TileConfig& t, const Arch& arch) {
  const int share = arch.registers_per_sm / (32 * t.warps * t.blocks_per_sm);
  return std::min(share / kRegisterUnit * kRegisterUnit, kMostRegisters);
}

/// Whether `blocks_per_sm` blocks can live on one SM. Its limit of threads (1536 or more) is met by
/// whatever meets that of registers.
bool lives(KernelKind kind, const AttentionSpec& s, const TileConfig& t, const Arch& arch) {
  const int block_bytes = shared_bytes(kind, s, t) + kReservedBytes;
  return t.blocks_per_sm * block_bytes <= arch.max_shared_bytes + kReservedBytes &&
         registers_for(t, arch) >= accumulators(kind, s, t.family) + kOtherRegisters;
}

/// Residency reaches a kernel's code only as the registers it may use.
bool same_code(const TileConfig& a, const TileConfig& b, const Arch& arch) {
  TileConfig other = b;
  other.blocks_per_sm = a.blocks_per_sm;
  return a == other && registers_for(a, arch) == registers_for(b, arch);
}

/// dP is formed of 16-bit values, and S under qk16.
bool has_16_bit_products(KernelKind kind, const AttentionSpec& s) {
  return kind != KernelKind::forward || s.precision == Precision::qk16;
}

} // namespace

std::string objection_to_trying(KernelKind kind, const AttentionSpec& s, const TileConfig& tile,
                                const Arch& arch) {
  if (std::string why = objection(kind, s, tile, arch); !why.empty())
    return why;
  const Family family = default_tile(kind, s, arch).family;
  if (s.deterministic && has_16_bit_products(kind, s) && tile.family != family)
    return std::string(to_string(tile.family)) + " sums 16-bit products in another order than " +
           std::string(to_string(family)) +
           ", the default's family: under 'deterministic' results "
           "must not change by a bit";
  return "";
}

std::vector<TileConfig> tiles_worth_trying(KernelKind kind, const AttentionSpec& spec,
                                           const Arch& arch) {
  if (kind < KernelKind::forward)
    return {};
  const AttentionSpec s = resolved(spec, arch);
  const bool keys = kind == KernelKind::backward_dkv;
  std::vector<TileConfig> tiles = {default_tile(kind, s, arch)};
  for (Family family : {Family::mma, Family::wgmma})
    for (int warps : {4, 8})
      for (int stages : {1, 2})
        for (int blocks = 8; blocks >= 1; --blocks) { // of equal ones, the most that fit
          const int rows = 16 * warps;
          const TileConfig tile = {family, keys ? 64 : rows, keys ? rows : s.group_kv,
                                   warps,  stages,           blocks};
          if (objection_to_trying(kind, s, tile, arch).empty() && lives(kind, s, tile, arch) &&
              std::none_of(tiles.begin(), tiles.end(),
                           [&](const TileConfig& known) { return same_code(known, tile, arch); }))
            tiles.push_back(tile);
        }
  return tiles;
}

} // namespace sagebwd
