//===- tile.h - How fast an attention kernel runs --------------------------===//
#pragma once

#include "generator/fields.h"

#include <string>
#include <string_view>

namespace sagebwd {

/// What a kernel is built from: warp-level mma.sync (sm_80 and later), warpgroup-level wgmma
/// (sm_90a), the latter warp-specialised, where one warp copies and the others multiply, or that
/// with pairs of warpgroups that own the same tokens, for gradients of wide heads.
enum class Family { mma, wgmma, ws, pair };
template <> struct Words<Family> {
  static constexpr std::string_view what = "kernel family";
  static constexpr std::pair<Family, std::string_view> all[] = {
      {Family::mma, "mma"}, {Family::wgmma, "wgmma"}, {Family::ws, "ws"}, {Family::pair, "pair"}};
};

constexpr bool warp_specialised(Family family) {
  return family == Family::ws || family == Family::pair;
}

/// How fast an attention kernel runs; never what it computes, but for FP32 summation order.
/// `block_q` x `block_kv` is the tile one thread block works on at a time.
struct TileConfig {
  Family family = Family::mma;
  int block_q = 0;
  int block_kv = 0;
  int warps = 0;
  int stages = 0;        ///< copies of each streamed tile kept in shared memory
  int blocks_per_sm = 1; ///< residency the register allocation must allow

  bool operator==(const TileConfig&) const = default;
};

template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, TileConfig>
constexpr void visit_fields(Self& t, Visitor&& visit) {
  visit(Label{"family", "", "matrix instructions"}, t.family);
  visit(Label{"block_q", " ", "queries of a tile"}, t.block_q);
  visit(Label{"block_kv", "x", "keys of a tile"}, t.block_kv);
  visit(Label{"warps", " w", "warps of a thread block that multiply"}, t.warps);
  visit(Label{"stages", " s", "copies of each streamed tile in shared memory"}, t.stages);
  visit(Label{"blocks_per_sm", " b", "thread blocks that the registers let live on an SM"},
        t.blocks_per_sm);
}

/// "mma 128x64 w8 s2 b1".
std::string to_string(const TileConfig&);
/// Its inverse; raises SpecError.
TileConfig parse_tile(std::string_view);

} // namespace sagebwd
