//===- backward_dq.cpp - dQ -----------------------------------------------===//

#include "generator/kernels/attention.h"
#include "generator/pointwise.h"

#include "templates/layouts/backward_dq.cuh"
#include "templates/layouts/backward_dq_pair.cuh"
#include "templates/layouts/backward_dq_ws.cuh"
#include "templates/layouts/halves.cuh"

#include <algorithm>

namespace sagebwd::attention {
namespace {

/// The kernel depends on the formats of S and of dQ's product, and on which dO it reads. Under
/// `block` that is always the caller's dO, so that dv16 and six_of_seven share a kernel.
void narrow_dq(AttentionSpec& s) {
  const DpSums given = s.dp_sums;
  narrow(s);
  s.dp_sums = given;
  if (blockwise(s) && s.precision == Precision::dv16)
    s.precision = Precision::six_of_seven;
}

/// Whether registers hold the rows of Q and dO in the whole loop, and shared memory holds these
/// rows only before the first keys. This is needed if 128 queries of 16 bits leave no room for keys
/// in 99 KB of shared memory. All other kernels have no registers for the rows.
bool dq_holds_rows(const AttentionSpec& s, Family family) {
  return family.instruction() == Instruction::mma && blockwise(s) && scores16(s);
}

const Tiling kBackwardDq = {
    .pass = Pass::backward,
    .blocks_own_keys = false,
    .stages = {0, 1, 2},
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          return BackwardDqLayout(shape_of(s, t), dq_holds_rows(s, t.family)).total;
        },
    .objection = [](const AttentionSpec& s, const TileConfig& t) -> std::string {
      // ptxas spills 244 to 372 bytes with every mask, with every register usage level (0 to 10)
      // and with -O1.
      if (t.family.instruction() == Instruction::mma && blockwise(s) && scores16(s) &&
          width(s) > kWidestFused)
        return "above " + std::to_string(kWidestFused) + " channels " + value_text(s.precision) +
               " under '" + value_text(s.granularity) +
               "' needs more registers than mma.sync leaves; use granularity row, another "
               "precision, or sm_90a";
      if (blockwise(s) && t.block_q != s.group_q)
        return "under '" + value_text(s.granularity) + "' the tile must be the group of " +
               std::to_string(s.group_q) + " queries";
      return objection_to_turns(s, t);
    },
    // A thread holds dQ, and beside it first the group's dS and a tile's scores, then dS in 8 bits
    // and the products.
    .accumulators =
        [](const AttentionSpec& s, Family family) {
          const int group = s.group_kv / 2;
          return gradient_channels(s) / 2 +
                 std::max(group + kTokensPerTile / 2, group / 4 + product_registers(s, family));
        },
    .sums_16_bit_products = [](const AttentionSpec&) { return true; },
    .outputs = [](const AttentionSpec& s, const Problem& p) -> std::vector<Output> {
      const int64_t heads = p.batch * p.heads;
      std::vector<Output> outputs = {{O::dq, heads * p.seq_q * s.head_dim, Output::elements}};
      const int64_t tiles = heads * (padded(p.seq_q) / s.group_q) * (padded(p.seq_kv) / s.group_kv);
      if (blockwise(s) && which_int8(s.precision).dq)
        for (O maxima : {O::tile_p_max, O::tile_ds_max})
          outputs.push_back({maxima, tiles, Output::floats, /*whole=*/false});
      return outputs;
    },
};

/// Kernels with 16-bit queries for wide heads that do not fill the width have the fewest registers
/// left.
bool has_fewest_registers(const KernelSpec& k) {
  return is_part(k) && width(k.attention) > kWidestFused && scores16(k.attention);
}

void configure_dq(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  const bool held = dq_holds_rows(k.attention, k.tile.family);
  c.add("VALUE_UNROLL", width(k.attention) / 16);
  c.add("SCORE_ROWS_IN_REGISTERS", held);
  c.add("VALUE_ROWS_IN_REGISTERS", held);
  // MASK_APART makes a loop of its own for groups that need a mask. If there are two loops, ptxas
  // serialises wgmma's products (note C7511), and at 128 channels it keeps more addresses than
  // there are registers.
  c.add("MASK_APART", k.tile.family.instruction() == Instruction::mma && !wide(k.attention) &&
                          !hides_anywhere(k.attention)); // any group may need a mask there
  c.add("LEAN_COPIES", has_fewest_registers(k));
  // HOLDS_COPIER keeps the place of copied rows in a register. No register is free for that with
  // four warps at 128 channels, nor with 16-bit queries.
  c.add("HOLDS_COPIER", k.tile.family.instruction() == Instruction::mma &&
                            !blockwise(k.attention) && k.attention.precision != Precision::qk16 &&
                            (!wide(k.attention) || k.tile.warps == 8));
}

Tiling tiling_of_dq_ws() {
  Tiling tiling = kBackwardDq;
  tiling.warps = {8};
  tiling.stages = {2, 4};
  tiling.shared_bytes = bytes_of<BackwardDqWsLayout>;
  tiling.objection = [](const AttentionSpec& s, const TileConfig& t) -> std::string {
    if (scores16(s))
      return "it copies 8-bit tiles alone, and under '" + value_text(s.precision) +
             "' Q and K have 16 bits; the family wgmma has them";
    if (is_sparse(s) && !which_int8(s.precision).dq && s.sparse_kv != 2 * kTokensPerTile)
      return "in 16 bits it takes 128 keys at a time, and a block of the lists has " +
             std::to_string(s.sparse_kv) + "; the family wgmma takes fewer";
    if (width(s) > kWidestFused)
      return too_wide(s);
    if (score_reads_positions(s)) // up to 1060 bytes (compiled)
      return "addresses of what its score function reads spill; the family wgmma has it";
    if (blockwise(s) && which_int8(s.precision).dq)
      return "its warpgroups share no scale, which '" + value_text(s.granularity) +
             "' has for all queries of a block; the family wgmma does";
    return "";
  };
  // A thread holds dQ, scores, and a block of accumulators for dP and later for products.
  tiling.accumulators = [](const AttentionSpec& s, Family) {
    return width(s) / 2 + std::max(s.group_kv, width(s)) / 2 + s.group_kv / 2;
  };
  return tiling;
}
const Tiling kBackwardDqWs = tiling_of_dq_ws();

Tiling tiling_of_dq_pair() {
  Tiling tiling = kBackwardDq;
  tiling.warps = {8};
  tiling.tokens_a_warp = 8;
  tiling.stages = {1, 2};
  tiling.shared_bytes = [](const AttentionSpec& s, const TileConfig& t) {
    return very_wide(s) ? bytes_of<HalvesLayout>(s, t) : bytes_of<BackwardDqPairLayout>(s, t);
  };
  tiling.accumulators = [](const AttentionSpec& s, Family family) {
    return very_wide(s) ? width(s) / 4 + 2 * 32 : kBackwardDq.accumulators(s, family);
  };
  tiling.objection = [](const AttentionSpec& s, const TileConfig& t) -> std::string {
    if (very_wide(s))
      return t.stages == 1 ? "" : "of very wide heads shared memory has room for one stage";
    if (s.group_kv != 2 * kTokensPerTile)
      return "its warpgroups share out groups of 128 keys; the family wgmma has smaller ones";
    return objection_to_pair(s, t);
  };
  return tiling;
}
const Tiling kBackwardDqPair = tiling_of_dq_pair();

} // namespace

KernelDefinition backward_dq(Family family) {
  const ParamFields fields =
      fields_named({O::q, O::k, O::v, O::dout, O::dq, O::dlse, O::k_mean, O::q8, O::q_rows, O::k8,
                    O::k8_scale, O::kt8, O::kt8_scale, O::dout_rows, O::k_rows, O::tile_p_max,
                    O::tile_ds_max, O::mean_scores});
  return {
      .kind = KernelKind::backward_dq,
      .of = Backward::split,
      .family = family,
      .passes = {Pass::backward},
      .narrow = narrow_dq,
      .fields = fields,
      .half_fields = fields_and(fields, {O::half_v, O::half_dout, O::dp_factor}),
      .root_template = "kernels/backward_dq.cuh",
      .configure = configure_dq,
      .threads = threads,
      .grid = grid,
      .tiling = &kBackwardDq,
  };
}

KernelDefinition backward_dq_ws() {
  KernelDefinition specialised = backward_dq(Family::ws);
  specialised.half_fields.clear();
  specialised.fields =
      fields_named({O::k, O::dq, O::dlse, O::k_mean, O::q8, O::q_rows, O::k8, O::k8_scale, O::kt8,
                    O::kt8_scale, O::dout_rows, O::k_rows, O::v_rows, O::v_map, O::dout_map});
  specialised.root_template = "kernels/backward_dq_ws.cuh";
  specialised.tiling = &kBackwardDqWs;
  return specialised;
}

KernelDefinition backward_dq_pair() {
  KernelDefinition paired = backward_dq_ws();
  paired.family = Family::pair;
  paired.root_template = "kernels/backward_dq_pair.cuh";
  paired.very_wide_template = "kernels/backward_dq_halves.cuh";
  paired.tiling = &kBackwardDqPair;
  return paired;
}

} // namespace sagebwd::attention
