//===- team.cpp - O, dQ, dK and dV of very wide heads -----------------------===//
//
// Of heads of more than 256 channels a team of warps shares out the channels
// (templates/tile/math/team_products.cuh). check_very_wide() in resolved.cpp says which specs have
// such heads.
//
//===----------------------------------------------------------------------===//

#include "generator/kernels/attention.h"

#include "templates/layouts/forward_pair.cuh"
#include "templates/layouts/team.cuh"

namespace sagebwd::attention {
namespace {

/// A block of a team has an SM's registers to itself.
std::string objection_to_team(const AttentionSpec&, const TileConfig& t) {
  return t.blocks_per_sm == 1 ? "" : "registers suffice for one block per SM";
}

/// The tiling of a family's kernel for a team: of other tokens, and with another layout.
Tiling of_team(const Tiling& other, int tokens_a_warp,
               int (*shared_bytes)(const AttentionSpec&, const TileConfig&)) {
  Tiling tiling = other;
  tiling.warps = {TeamLayout::WARPS};
  tiling.tokens_a_warp = tokens_a_warp;
  tiling.stages = {1};
  tiling.shared_bytes = shared_bytes;
  tiling.objection = objection_to_team;
  // A warp sums 64 channels of all the block's tokens, in dK and dV of two gradients. Beside them
  // it has P or dS as an operand.
  tiling.accumulators = tokens_a_warp == 8 ? [](const AttentionSpec&, Family) { return 128 + 32; }
                                           : [](const AttentionSpec&, Family) { return 128 + 16; };
  return tiling;
}

/// The forward by a pair of warpgroups with half of O's channels each.
Tiling tiling_of_forward_pair() {
  Tiling tiling = *forward(Family::mma).tiling;
  tiling.warps = {8};
  tiling.tokens_a_warp = 8;
  tiling.stages = {1};
  tiling.shared_bytes = bytes_of<ForwardPairLayout>;
  tiling.objection = [](const AttentionSpec& s, const TileConfig&) -> std::string {
    return very_wide(s) ? ""
                        : "one warpgroup holds O of at most " + std::to_string(kWidestWithAll) +
                              " channels; the family '" + value_text(Family::ws) + "' has it";
  };
  // A warpgroup holds half of O, and two blocks of products or scores.
  tiling.accumulators = [](const AttentionSpec& s, Family) { return width(s) / 4 + 2 * 32; };
  return tiling;
}

/// The definition for a family of very wide heads.
KernelDefinition for_team(KernelDefinition definition, std::string_view root_template,
                          const Tiling& tiling, Family family = Family::team) {
  definition.family = family;
  definition.half_fields.clear();
  definition.root_template = root_template;
  definition.configure = [](Configuration& c, const KernelSpec& k) {
    configure_common(c, k);
    // Gradients of heads that do not fill 512 channels spill else, and on Blackwell the forward.
    c.add("LEAN_COPIES", k.kind != KernelKind::forward || k.arch.is_blackwell());
  };
  definition.tiling = &tiling;
  return definition;
}

} // namespace

KernelDefinition forward_team() {
  static const Tiling tiling =
      of_team(*forward(Family::mma).tiling, 8, bytes_of<TeamForwardLayout>);
  return for_team(forward(Family::mma), "kernels/forward_team.cuh", tiling);
}

KernelDefinition forward_pair() {
  static const Tiling tiling = tiling_of_forward_pair();
  return for_team(forward(Family::mma), "kernels/forward_pair.cuh", tiling, Family::pair);
}

KernelDefinition backward_dq_team() {
  static const Tiling tiling = of_team(*backward_dq(Family::mma).tiling, 4, bytes_of<TeamDqLayout>);
  return for_team(backward_dq(Family::mma), "kernels/backward_dq_team.cuh", tiling);
}

KernelDefinition backward_dkv_team() {
  static const Tiling tiling =
      of_team(*backward_dkv(Family::mma).tiling, 4, bytes_of<TeamDkvLayout>);
  return for_team(backward_dkv(Family::mma), "kernels/backward_dkv_team.cuh", tiling);
}

} // namespace sagebwd::attention
