//===- case.h - What a GPU test runs: a spec, and tiles ---------------------===//
#pragma once

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/space.h"
#include "tests/gpu/device.h"

#include <optional>
#include <string>
#include <string_view>

namespace sagebwd::test {

/// A spec, and its tiles where they are not the architecture's default.
struct Case {
  std::string name;
  AttentionSpec spec;
  std::optional<Tiles> tiles;
};

/// Tiles of the family mma: the defaults of another architecture, which sm_90a can run too.
inline Tiles mma_tiles(const AttentionSpec& spec, std::string_view arch = "sm_80") {
  Tiles tiles;
  for (KernelKind kind : tiled_kernels())
    tiles[kind] = default_tile(kind, resolved(spec), find_arch(arch));
  return tiles;
}
/// sm_90a's of one family, where another is its default.
inline Tiles family_tiles(const AttentionSpec& spec, Family family) {
  return default_tiles(resolved(spec), find_arch("sm_90a"), family);
}
/// Eight warps and two stages, where sm_90a's defaults have fewer.
inline Tiles large_wgmma_tiles(const AttentionSpec& spec) {
  const TileConfig queries{Family::wgmma, 128, spec.group_kv, 8, 2, 1};
  return {{KernelKind::forward, queries},
          {KernelKind::backward_dq, queries},
          {KernelKind::backward_dkv, {Family::wgmma, 64, 128, 8, 2, 1}}};
}
inline bool runs_on(const Case& c, const Arch& arch) {
  return !c.tiles || c.tiles->begin()->second.family.instruction() == Instruction::mma ||
         arch.name == "sm_90a";
}

} // namespace sagebwd::test
