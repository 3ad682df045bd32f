//===- tile.h - The tile of an attention kernel ----------------------------===//
#pragma once

#include "generator/fields.h"

#include <string>
#include <string_view>

namespace sagebwd {

/// The matrix instruction of a kernel, and how its warps divide the work.
/// - mma: warps multiply with mma.sync, on sm_80 and later.
/// - wgmma: warpgroups multiply with wgmma, on sm_90a.
/// - ws: wgmma, warp-specialised. One thread copies, and warpgroups of other threads multiply.
/// - pair: as ws, with pairs of warpgroups that own the same tokens, for gradients of wide heads.
enum class Family { mma, wgmma, ws, pair };
template <> struct Words<Family> {
  static constexpr std::string_view what = "kernel family";
  static constexpr std::pair<Family, std::string_view> all[] = {
      {Family::mma, "mma"}, {Family::wgmma, "wgmma"}, {Family::ws, "ws"}, {Family::pair, "pair"}};
};

constexpr bool warp_specialised(Family family) {
  return family == Family::ws || family == Family::pair;
}

/// The tile and the resources of one thread block. They decide how fast a kernel runs. Of the
/// results they can change only the order of FP32 sums, and where these are rounded. `block_q` x
/// `block_kv` is the tile that a thread block works on at a time.
struct TileConfig {
  Family family = Family::mma;
  int block_q = 0;
  int block_kv = 0;
  int warps = 0;
  /// How many tiles of each streamed tensor shared memory has room for. With 0 parts of a tile take
  /// turns.
  int stages = 0;
  int blocks_per_sm = 1; ///< how many blocks must be able to live on one SM, by their registers

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

/// For example "mma 128x64 w8 s2 b1".
std::string to_string(const TileConfig&);
/// The inverse of to_string(). Raises SpecError.
TileConfig parse_tile(std::string_view);

} // namespace sagebwd
