//===- tile.h - The tile of an attention kernel ----------------------------===//
#pragma once

#include "generator/fields.h"

#include <compare>
#include <string>
#include <string_view>

namespace sagebwd {

/// The matrix instruction that multiplies.
enum class Instruction {
  mma,   ///< mma.sync, of a warp, on sm_80 and later
  wgmma, ///< wgmma, of a warpgroup, on sm_90a
};
template <> struct Words<Instruction> {
  static constexpr std::string_view what = "matrix instruction";
  static constexpr Word<Instruction> all[] = {{Instruction::mma, "mma"},
                                              {Instruction::wgmma, "wgmma"}};
};

/// How the threads of a block divide the work.
enum class Roles {
  alike,  ///< every warp copies and multiplies
  copier, ///< one thread copies, and warpgroups of other threads multiply
  pairs,  ///< the same, and two warpgroups own the same tokens, for gradients of wide heads
  team,   ///< every warp copies and multiplies; warps share out the channels of very wide heads
};

/// How a kernel multiplies and how its threads divide the work. There are five such families; no
/// kernel combines the two in another way.
class Family {
public:
  static const Family mma, wgmma, ws, pair, team;

  constexpr Family() = default; ///< mma
  constexpr Instruction instruction() const { return instruction_; }
  constexpr Roles roles() const { return roles_; }

  auto operator<=>(const Family&) const = default;
  /// A number that no other family has.
  explicit constexpr operator size_t() const {
    return static_cast<size_t>(instruction_) * 4 + static_cast<size_t>(roles_);
  }

private:
  constexpr Family(Instruction instruction, Roles roles)
      : instruction_(instruction), roles_(roles) {}

  Instruction instruction_ = Instruction::mma;
  Roles roles_ = Roles::alike;
};
inline constexpr Family Family::mma(Instruction::mma, Roles::alike);
inline constexpr Family Family::wgmma(Instruction::wgmma, Roles::alike);
inline constexpr Family Family::ws(Instruction::wgmma, Roles::copier);
inline constexpr Family Family::pair(Instruction::wgmma, Roles::pairs);
inline constexpr Family Family::team(Instruction::mma, Roles::team);

template <> struct Words<Family> {
  static constexpr std::string_view what = "kernel family";
  static constexpr Word<Family> all[] = {{Family::mma, "mma"},
                                         {Family::wgmma, "wgmma"},
                                         {Family::ws, "ws"},
                                         {Family::pair, "pair"},
                                         {Family::team, "team"}};
};

/// The tile and the resources of one thread block. They decide how fast a kernel runs. They can
/// change nothing of the results but the order of FP32 sums, and where these are rounded. `block_q`
/// x `block_kv` is the tile that a thread block works on at a time.
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
  visit(Label{"family", "", "matrix instruction, and who copies"}, t.family);
  visit(Label{"block_q", " ", "queries of a tile"}, t.block_q);
  visit(Label{"block_kv", "x", "keys of a tile"}, t.block_kv);
  visit(Label{"warps", " w", "warps of a thread block that multiply"}, t.warps);
  visit(Label{"stages", " s", "copies of each streamed tile in shared memory"}, t.stages);
  visit(Label{"blocks_per_sm", " b", "thread blocks that the registers let live on an SM"},
        t.blocks_per_sm);
}

/// For example "mma 128x64 w8 s2 b1".
inline std::string to_string(const TileConfig& tile) { return line_of(tile); }
/// The inverse of to_string(). Raises SpecError.
inline TileConfig parse_tile(std::string_view text) {
  TileConfig tile;
  if (!parse_line(text, tile))
    throw SpecError("cannot read tile '" + std::string(text) + "': expected the family (" +
                    known_words<Family>(" or ") +
                    "), block_q x block_kv, warps, stages and blocks per SM, as in "
                    "'mma 64x128 w4 s1 b2'");
  return tile;
}

} // namespace sagebwd
