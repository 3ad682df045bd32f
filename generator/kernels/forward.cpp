//===- forward.cpp - O and lse --------------------------------------------===//

#include "generator/kernels/attention.h"

#include "templates/layouts/forward.cuh"
#include "templates/layouts/forward_ws.cuh"

#include <algorithm>

namespace sagebwd::attention {
namespace {

/// The forward depends on the precision only by the format of S: PV is always INT8, and all other
/// products are the backward's.
void narrow_forward(AttentionSpec& s) {
  narrow(s);
  if (!scores16(s))
    s.precision = Precision::six_of_seven;
}

const Tiling kForward = {
    .pass = Pass::forward,
    .blocks_own_keys = false,
    .shared_bytes = bytes_of<ForwardLayout>,
    .objection = [](const AttentionSpec&, const TileConfig&) { return std::string(); },
    // A thread holds O, and beside it first the group's scores, then P in 8 bits and the products.
    .accumulators =
        [](const AttentionSpec& s, Family family) {
          const int group = s.group_kv / 2;
          return width(s) / 2 + std::max(group, group / 4 + product_registers(s, family));
        },
    .sums_16_bit_products = scores16,
    .outputs = [](const AttentionSpec& s, const Problem& p) -> std::vector<Output> {
      const int64_t queries = p.batch * p.heads * p.seq_q;
      return {{O::out, queries * s.head_dim, Output::elements}, {O::lse, queries, Output::floats}};
    },
};

void configure_forward(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  // The rows of Q stay in registers if there is room. At 128 channels the schedules of ptxas for
  // Blackwell leave no room; the rows are then read again, which is one in seventeen reads of
  // shared memory. At 256 channels no GPU has room.
  const bool in_registers =
      !wide(k.attention) || (width(k.attention) <= kWidestFused && !k.arch.is_blackwell());
  configure_operands(c, k, in_registers, width(k.attention) / 16);
  // LEAN_COPIES leaves registers free, which ptxas needs for wgmma's accumulators. With mma.sync
  // ptxas makes worse code from lean copies, except above 64 channels.
  c.add("LEAN_COPIES", k.tile.family.instruction() != Instruction::mma || wide(k.attention));
}

Tiling tiling_of_forward_ws() {
  Tiling tiling = kForward;
  tiling.warps = {8, 12};
  tiling.warpgroups_walk_alone = true;
  tiling.stages = {2, 4};
  tiling.shared_bytes = bytes_of<ForwardWsLayout>;
  tiling.objection = [](const AttentionSpec& s, const TileConfig& t) -> std::string {
    if (scores16(s))
      return "it copies 8-bit tiles alone, and under '" + value_text(s.precision) +
             "' Q and K have 16 bits; the family wgmma has them";
    // On an H200, beside a plain call: ALiBi takes 1.64 here and 1.81 in wgmma at D64, 1.53
    // and 1.61 at D128; soft-capping 1.81 and 1.73, 1.75 and 1.59. A bias spills up to 672 bytes
    // (compiled).
    if (score_calls_functions(s) || score_reads_positions(s))
      return "score functions that call tanh, exp and the like, or that read at positions, are for "
             "the family wgmma";
    if (width(s) > kWidestFused && t.warps == 12)
      return "registers do not suffice for three warpgroups at " + std::to_string(width(s)) +
             " channels";
    return "";
  };
  return tiling;
}
const Tiling kForwardWs = tiling_of_forward_ws();

} // namespace

KernelDefinition forward(Family family) {
  return {
      .kind = KernelKind::forward,
      .family = family,
      .passes = {Pass::forward},
      .narrow = narrow_forward,
      .fields = fields_named({O::q, O::k, O::v, O::out, O::lse, O::q8, O::q_rows, O::k8,
                              O::k8_scale, O::vt8, O::vt8_scale, O::mean_scores}),
      .root_template = "kernels/forward.cuh",
      .configure = configure_forward,
      .threads = threads,
      .grid = grid,
      .tiling = &kForward,
  };
}

KernelDefinition forward_ws() {
  KernelDefinition specialised = forward(Family::ws);
  specialised.root_template = "kernels/forward_ws.cuh";
  specialised.takes_work_tiles = true;
  specialised.tiling = &kForwardWs;
  return specialised;
}

} // namespace sagebwd::attention
