//===- choice.cpp - Default tiles, and tiles for a tuner -------------------===//

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/pointwise.h"

#include <algorithm>

namespace sagebwd {
namespace {

/// The family of a kernel's default tile: of the families that build the kernel, the fastest on the
/// architecture.
Family preferred_family(KernelKind kind, const AttentionSpec& s, const Arch& arch) {
  if (very_wide(s) && kind != KernelKind::backward)
    return arch.has_wgmma() && builds(kind, s, Family::pair) ? Family::pair : Family::team;
  if (!arch.has_wgmma())
    return Family::mma;
  if (builds(kind, s, Family::pair))
    return Family::pair;
  // The forward of the family wgmma has three small blocks per SM, that of ws one large block.
  // Measured on an H200: with a mask the small blocks are faster up to 4096 tokens. Without a mask,
  // at 64 channels, they are faster by 9 % up to 1024 tokens, and slower by 2 % at 2048 tokens and
  // by 7 % at 8192 tokens. With intervals or a mask expression they are faster by 5 to 12 %, up to
  // 32768 tokens.
  const bool masked = bounded_behind(s) || hides_anywhere(s);
  const bool small_blocks = kind == KernelKind::forward && !widest(s) && masked;
  if (builds(kind, s, Family::ws) && !small_blocks)
    return Family::ws;
  // The family wgmma has no fused backward. If ws does not build a fused backward either, the split
  // backward of wgmma is preferred to the fused backward of mma.
  const KernelKind split = kind == KernelKind::backward ? KernelKind::backward_dq : kind;
  return builds(split, s, Family::wgmma) ? Family::wgmma : Family::mma;
}

/// The fastest settings of a kernel, if they fit. For families without a copier `warps` is 0, and
/// default_tile() takes 4 warps if several blocks fit on an SM, else 8.
struct Wish {
  int stages, blocks_per_sm, warps = 0;
};

Wish wish_of_forward(const AttentionSpec& s, Family family) {
  if (family.roles() == Roles::pairs)
    return {1, 1, 8};
  if (family.roles() == Roles::copier)
    return widest(s) ? Wish{2, 1, 8} : Wish{4, 1, is_sparse(s) ? 8 : 12};
  // A third block would leave wide heads 168 registers, too few for 16-bit scores, and above 128
  // channels for groups of 64 keys (1.6 KB spilled) or for lists.
  // Addresses of what a score function reads spill up to 1140 bytes with three blocks.
  const bool third = family.instruction() == Instruction::wgmma && !(wide(s) && scores16(s)) &&
                     !(widest(s) && (s.group_kv == 64 || is_sparse(s))) && !score_reads(s);
  // At 128 channels three blocks per SM spill with one stage. At 64 channels with a mask, a second
  // stage and a fourth block make the kernel 5 to 9 % faster (tuned on an H200, at 2048 and 8192
  // tokens).
  const bool masked = bounded_behind(s) && !scores16(s);
  const bool staged = third && s.group_kv == 128 && (wide(s) || masked);
  // Four blocks leave 128 registers per thread. With so few, kernels for packed sequences spill, as
  // do kernels with a window for a part of the channels, and kernels that do not compute the first
  // key separately (compiled).
  const bool fourth = staged && !wide(s) && !s.packed &&
                      (bounded_before(s) ? s.head_dim == width(s) : s.sink_keys > 0);
  // With lists of 64 keys a fourth block makes the kernel 10 % faster (predicted for an RTX 4090).
  const bool of_lists =
      family == Family::mma && !wide(s) && is_sparse(s) && s.group_kv == 64 && !scores16(s);
  return {staged ? 2 : 1, fourth || of_lists ? 4 : third ? 3 : 2};
}

Wish wish_of_dq(const AttentionSpec& s, Family family) {
  if (family.roles() == Roles::pairs)
    return {which_int8(s.precision).dq && !very_wide(s) ? 2 : 1, 1, 8};
  if (family.roles() == Roles::copier)
    return {wide(s) ? 2 : 4, 1, 8};
  const bool third =
      family.instruction() == Instruction::wgmma && !wide(s) && !scores16(s) && !score_reads(s);
  // At 128 channels two stages of 16-bit keys and of values leave no shared memory for a second
  // block. With three blocks and a mask, the addresses of a second stage spill.
  const bool second = third ? !bounded_behind(s) : !(wide(s) && scores16(s));
  return {second ? 2 : 1, third ? 3 : 2};
}

Wish wish_of_dkv(const AttentionSpec& s, Family family) {
  const Int8Products int8 = which_int8(s.precision);
  if (family.roles() == Roles::pairs)
    return {1, 1, 8};
  // Three warpgroups that keep slopes, or addresses of what a score function reads, until P is in 8
  // bits spill 200 to 330 bytes (compiled).
  const bool keeps = int8.dv && (bends_scores(s) || score_reads_positions(s));
  if (family.roles() == Roles::copier)
    return wide(s) ? Wish{2, 1, 8} : Wish{4, 1, is_sparse(s) || keeps ? 8 : 12};
  const bool wgmma = family.instruction() == Instruction::wgmma;
  // With lists and 16-bit products a third block leaves few registers. Under `block` it spills up
  // to 124 bytes, except with 16-bit scores and no mask. If dV is in 16 bits, one stage spills 8 or
  // 16, and is the fastest: both kernels of the gradients take 5.04 ms on an H200 (D64, 32K tokens,
  // 16 heads, 10 % of blocks of 128 x 64), with two stages 5.13, and with two blocks an SM 5.57.
  // Under `block` with 16-bit scores three blocks take 5.52 ms, two 5.97.
  const bool few = is_sparse(s) && blockwise(s) && (!int8.dv || (!int8.s && bounded_behind(s)));
  // With intervals three blocks spill 72 bytes, with a score function 64 (compiled).
  const bool three = wgmma && !wide(s) && int8.dk && !few && !hides_anywhere(s) && !has_score(s);
  // With 16-bit scores, two stages spill or leave no shared memory for a second block.
  const bool one_stage = scores16(s) || (!wgmma && wide(s)) || (three && is_sparse(s) && !int8.dv);
  return {one_stage ? 1 : 2, three ? 3 : 2};
}

Wish wish_of_fused(const AttentionSpec& s, Family family) {
  return family.roles() == Roles::copier ? Wish{wide(s) ? 2 : 4, 1, 8} : Wish{1, 1};
}

Wish wish_of(KernelKind kind, const AttentionSpec& s, Family family) {
  return kind == KernelKind::forward        ? wish_of_forward(s, family)
         : kind == KernelKind::backward_dq  ? wish_of_dq(s, family)
         : kind == KernelKind::backward_dkv ? wish_of_dkv(s, family)
                                            : wish_of_fused(s, family);
}

/// Whether one kernel for all gradients is faster than two, if it fits.
bool fused_is_faster(const AttentionSpec& s, const Arch& arch, Family family) {
  const Int8Products int8 = which_int8(s.precision);
  // S and dP should be formed once where tensor cores bind.
  // Predicted for an RTX 4090 (bench/results/balance.json, 8192 tokens without a mask, with the
  // pre-pass): at 64 channels split 32.2 ms, fused 26.6 ms; at 128 channels 32.8 and 27.9 ms. On an
  // H200 itself: at 64 channels 22.1 and 25.8 ms, at 128 channels 20.8 and 21.5 ms.
  // At 128 channels with a window it spills on consumer Blackwell, up to 40 bytes.
  const bool spills =
      arch.is_consumer_blackwell() && wide(s) && bounded_before(s) && !sums_dp_in_fp16(s);
  if (int8.dq)
    return arch.is_bound_by_tensor_cores() && !spills;
  // At 64 channels the split backward of ws is faster than the fused one: 16.7 ms and 17.4 ms, both
  // with the forward. But a split backward cannot sum dQ in FP16, and if a group has one scale, the
  // split backward is built by wgmma and not by ws.
  return family.roles() != Roles::copier || wide(s) || sums_dq_in_fp16(s) ||
         grouping_of(s.granularity).one_scale;
}

/// A fused backward of the family mma has an SM to itself with this tile.
TileConfig largest_fused_tile(const AttentionSpec& s) {
  return tile_with(KernelKind::backward, s, Family::mma, 8, 1, 1);
}

/// The tile of the fused backward of a family, if it has one for the spec and the tile fits.
std::optional<TileConfig> fused_tile(const AttentionSpec& s, const Arch& arch, Family family) {
  constexpr KernelKind kind = KernelKind::backward;
  if (!includes(families_of(kind), family))
    return std::nullopt;
  const auto tile = [&](int warps, int stages, int blocks) {
    return tile_with(kind, s, family, warps, stages, blocks);
  };
  if (family.roles() == Roles::copier) {
    const Wish wish = wish_of_fused(s, family);
    const TileConfig one = tile(wish.warps, wish.stages, wish.blocks_per_sm);
    return objection(kind, s, one, arch).empty() ? std::optional(one) : std::nullopt;
  }
  // If dQ is in 16 bits, two small blocks per SM are fastest, as one works while the other waits.
  // Times on an H200 at 64 and 128 channels: two small blocks 18.8 and 18.5 ms, one large block
  // 19.7 and 19.5 ms, a second stage 20.3 and 24.1 ms, split 22.2 and 21.5 ms. On Blackwell small
  // blocks spill at 128 channels. If dQ is INT8, a block takes 128 keys.
  std::vector<TileConfig> tiles = {largest_fused_tile(s)};
  if (!which_int8(s.precision).dq && !(wide(s) && arch.is_blackwell()))
    tiles.insert(tiles.begin(), tile(4, 1, 2));
  for (const TileConfig& t : tiles)
    if (objection(kind, s, t, arch).empty() && shares_memory(kind, s, t, arch))
      return t;
  return std::nullopt;
}

/// Raises the error that no tile fits. The message says what does fit, and why `least`, the tile
/// that needs the least memory, does not.
[[noreturn]] void fail_for(const TileConfig& least, KernelKind kind, const AttentionSpec& s,
                           const Arch& arch) {
  const Tiling& tiling = tiling_of(kind, least.family);
  const std::string none = "no tile of " + std::string(to_string(kind)) + " fits " + to_string(s) +
                           " on " + std::string(arch.name) + ": ";
  const bool fits = shared_bytes(kind, s, least) <= arch.max_shared_bytes;
  if (const std::string why = tiling.objection(s, least); fits && !why.empty())
    throw SpecError(none, why);
  // The remedy names nothing that the spec has already.
  const bool has_precision =
      s.precision == Precision::six_of_seven || s.precision == Precision::gradients16;
  const std::string row =
      blockwise(s) ? "granularity '" + value_text(Granularity::row) + "'" : std::string();
  const std::string precision = "precision '" + value_text(Precision::six_of_seven) + "' or '" +
                                value_text(Precision::gradients16) + "'";
  const std::string needed = has_precision ? row : precision + (row.empty() ? "" : " with " + row);
  throw SpecError(
      none, "for '", to_string(least), "', it needs ", shared_bytes(kind, s, least),
      " bytes of shared memory and ", arch.name, " has ", arch.max_shared_bytes,
      " per block; take ",
      widest(s) ? needed + (needed.empty() ? "" : ", ") + "a head dimension of at most " +
                      std::to_string(kWidestFused) + ", " +
                      "a GPU with more of it (A100, H100 and B200 have)" +
                      std::string(tiling.pass == Pass::backward
                                      ? ", or the forward pass alone (--pass forward; in "
                                        "a list pass: forward; in Python backward=False)"
                                      : "")
                : std::string(grouping_of(s.granularity).one_scale ? "'row'" : "group_kv = 64") +
                      ", another GPU, or precision six-of-seven");
}

/// The number of tokens that walk together, over the same tiles.
int tokens_a_walk(KernelKind kind, const TileConfig& t) {
  const Tiling& tiling = tiling_of(kind, t.family);
  return tiling.warpgroups_walk_alone ? 64 : tiling.blocks_own_keys ? t.block_kv : t.block_q;
}

/// Whether two tiles form sums in the same order. With a mask, the order depends on the tokens that
/// walk together: they decide where a walk begins and ends, in which order masked groups come, and
/// which units of channels the sums pass through. The edge of `top_left` lies at the query's own
/// index, so that the edges for 64 and for 128 tokens fall into the same groups of 128 tokens, and
/// into the same units.
bool same_steps(KernelKind kind, const AttentionSpec& s, const TileConfig& a, const TileConfig& b) {
  constexpr int kBoth = 128; // groups and units of both tiles are multiples of so many tokens
  const int of_a = tokens_a_walk(kind, a), of_b = tokens_a_walk(kind, b);
  if (of_a == of_b || !(bounded_behind(s) || bounded_before(s)))
    return true;
  const bool diagonal =
      s.causal == Causal::top_left && s.window_left == kNoWindow && s.window_right == kNoWindow;
  const bool in_groups =
      kind != KernelKind::backward_dq || (which_int8(s.precision).dq && s.group_kv == kBoth);
  return diagonal && in_groups && kBoth % of_a == 0 && kBoth % of_b == 0;
}

/// Why the results of a tile may differ from those of the default tile; empty if they cannot.
std::string objection_to_order(KernelKind kind, const AttentionSpec& s, const TileConfig& tile,
                               const TileConfig& by_default) {
  const std::string must = ": under 'deterministic' results must not change by a bit";
  const std::string family(to_string(tile.family)), other(to_string(by_default.family));
  if (tile.family != by_default.family && tiling_of(kind).sums_16_bit_products(s))
    return family + " sums 16-bit products in another order than " + other +
           ", the default's family" + must;
  if (tile.family.instruction() != by_default.family.instruction())
    return family + " rounds sums of INT8 products at other places than " + other +
           ", the default's family" + must;
  if (!same_steps(kind, s, tile, by_default))
    return "under a mask " + std::to_string(tokens_a_walk(kind, tile)) +
           " tokens are summed for in other steps than the default's " +
           std::to_string(tokens_a_walk(kind, by_default)) + must;
  return "";
}

} // namespace

TileConfig default_tile(KernelKind kind, const AttentionSpec& s, const Arch& arch) {
  return default_tile(kind, s, arch, preferred_family(kind, s, arch));
}

TileConfig default_tile(KernelKind kind, const AttentionSpec& s, const Arch& arch, Family family) {
  if (!definition_of(kind, family).tiling)
    return {};
  if (kind == KernelKind::backward)
    if (const auto fused = default_fused_tile(s, arch, family))
      return *fused;
  const auto tile = [&](int warps, int stages, int blocks) {
    return tile_with(kind, s, family, warps, stages, blocks);
  };
  if (family.roles() == Roles::team)
    return tile(8, 1, 1);
  const Wish wish = wish_of(kind, s, family);
  if (family.roles() != Roles::alike)
    return tile(wish.warps, wish.stages, wish.blocks_per_sm);
  // If an SM has several small blocks, one works while another waits. Tuned on an H200, small
  // blocks are faster than large ones. So there are as many blocks as registers allow without
  // spills, and a second stage if shared memory has room for it. If shared memory has room for only
  // one small block, one large block gives the SM as many warps as two small blocks.
  // Two large blocks per SM leave 128 registers per thread, too few for lists and a mask.
  const bool two = family.instruction() == Instruction::wgmma && !wide(s) && !is_sparse(s);
  const int large = two ? 2 : 1;
  const TileConfig several[] = {tile(4, wish.stages, wish.blocks_per_sm),
                                tile(4, 1, wish.blocks_per_sm), tile(8, wish.stages, large),
                                tile(8, 1, large)};
  for (const TileConfig& t : several)
    if (objection(kind, s, t, arch).empty() && shares_memory(kind, s, t, arch))
      return t;
  // Lists of 64 keys have no large block. Two whose parts of a tile take turns are faster than one.
  if (const TileConfig t = tile(4, 0, wish.blocks_per_sm);
      !widest(s) && objection(kind, s, t, arch).empty() && shares_memory(kind, s, t, arch))
    return t;
  // One block has the SM to itself. In 99 KB parts of a wide head's tiles take turns.
  const TileConfig alone[] = {tile(4, 2, wish.blocks_per_sm), tile(4, 1, wish.blocks_per_sm),
                              tile(4, 0, 1)};
  for (const TileConfig& t : alone)
    if (objection(kind, s, t, arch).empty())
      return t;
  const bool only_memory = tiling_of(kind, family).objection(s, several[1]).empty();
  fail_for(several[only_memory ? 1 : 3], kind, s, arch);
}

std::optional<TileConfig> default_fused_tile(const AttentionSpec& s, const Arch& arch,
                                             Family family) {
  return may_fuse_backward(s) && fused_is_faster(s, arch, family) ? fused_tile(s, arch, family)
                                                                  : std::nullopt;
}

std::optional<TileConfig> default_fused_tile(const AttentionSpec& s, const Arch& arch) {
  const Family preferred = preferred_family(KernelKind::backward, s, arch);
  if (!is_fused(s))
    return default_fused_tile(s, arch, preferred);
  std::vector<Family> families = families_of(KernelKind::backward);
  families.insert(families.begin(), preferred);
  for (Family family : families)
    if (const auto tile = fused_tile(s, arch, family))
      return tile;
  const TileConfig tile = largest_fused_tile(s);
  const bool small_groups = which_int8(s.precision).dq && s.group_kv == 64;
  const std::string why =
      small_groups ? "with group_kv = 64: with INT8 gradients it takes 128 keys, which share a "
                     "query's scale of dS"
                   : "on " + std::string(arch.name) + ": for '" + to_string(tile) + "', " +
                         objection(KernelKind::backward, s, tile, arch);
  throw SpecError(
      "gradient_kernels = ", Backward::fused, " is not supported for ", to_string(s), " ", why,
      "; take ",
      small_groups
          ? "group_kv = 128"
          : "a head dimension of at most 64, " +
                (blockwise(s) ? "" : "precision '" + value_text(Precision::six_of_seven) + "', ") +
                "another GPU",
      ", or leave gradient_kernels out for the kernels that the GPU has");
}

Tiles default_tiles(const ResolvedSpec& spec, const Arch& arch, Family family) {
  Tiles tiles;
  for (KernelKind kind : tiled_kernels())
    tiles[kind] = default_tile(
        kind, spec, arch, builds(kind, spec, family) ? family : preferred_family(kind, spec, arch));
  const auto asked_for = is_fused(spec) ? fused_tile(spec, arch, family) : std::nullopt;
  if (const auto fused = asked_for ? asked_for : default_fused_tile(spec, arch, family))
    tiles[KernelKind::backward] = *fused;
  return tiles;
}

std::string origin_of_default_tiles(const Arch& arch) {
  if (arch.has_wgmma())
    return "measured";
  return arch.is_bound_by_tensor_cores() ? "predicted" : "not measured";
}

std::string origin_in_words(const Arch& arch) {
  const std::string origin = origin_of_default_tiles(arch);
  const std::string tiles = "default tiles of " + std::string(arch.name) + " are ";
  if (origin == "measured")
    return tiles + "measured on an H200";
  return tiles +
         (origin == "predicted"
              ? "predicted, by an H200 with tensor cores slowed to those of GeForce"
              : "not measured: they are what is fastest for mma.sync on an H200") +
         "; 'sagebwd tune' finds the fastest on a GPU";
}

bool has_default_tile(const KernelSpec& k) {
  try {
    return k.tile == default_tile(k.kind, k.attention, k.arch);
  } catch (const SpecError&) {
    return false; // the kernel has no default tile: a tuning record chose this tile
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
  const TileConfig by_default = default_tile(kind, spec, arch);
  std::vector<TileConfig> tiles = tiles_that_fit(kind, spec, arch, by_default);
  if (spec->deterministic)
    std::erase_if(tiles, [&](const TileConfig& tile) {
      return !objection_to_order(kind, spec, tile, by_default).empty();
    });
  return tiles;
}

TileContest tile_contest(KernelKind kind, const ResolvedSpec& spec, const Arch& arch,
                         const std::vector<TileConfig>& named) {
  if (named.empty())
    return {kind, tiles_worth_trying(kind, spec, arch), {}, {}};
  TileContest contest = {kind, {default_tile(kind, spec, arch)}, {}, {}};
  for (const TileConfig& tile : named) {
    contest.objections.push_back(objection_to_trying(kind, spec, tile, arch));
    if (contest.objections.back().empty() && !includes(contest.tiles, tile))
      contest.tiles.push_back(tile);
  }
  return contest;
}

} // namespace sagebwd
