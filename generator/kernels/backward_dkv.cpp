//===- backward_dkv.cpp - dK and dV, alone or with dQ ---------------------===//
//
// The kernel backward adds each tile's part of dQ to sums in memory, which the kernel round_dq
// rounds. For the family mma its template is kernels/backward_fused.cuh or, if gradients are in 16
// bits, kernels/backward_dkv.cuh, as that of backward_dkv.
//
//===----------------------------------------------------------------------===//

#include "generator/kernels/attention.h"
#include "generator/pointwise.h"

#include "templates/layouts/backward_dkv.cuh"
#include "templates/layouts/backward_dkv_pair.cuh"
#include "templates/layouts/backward_dkv_pair16.cuh"
#include "templates/layouts/backward_dkv_ws.cuh"
#include "templates/layouts/backward_fused.cuh"
#include "templates/layouts/halves.cuh"

#include <algorithm>

namespace sagebwd::attention {
namespace {

template <bool WITH_DQ> int bytes_of_dkv(const AttentionSpec& s, const TileConfig& t) {
  return BackwardDkvLayout(shape_of(s, t), WITH_DQ, sums_dp_in_fp16(s)).total;
}
// A thread holds dK and dV, and beside them first a tile's P and dP, then dS, P in 8 bits and
// products.
int accumulators_of_dkv(const AttentionSpec& s, Family family) {
  const int tile = kTokensPerTile / 2;
  return gradient_channels(s) + std::max(2 * tile, tile + tile / 4 + product_registers(s, family));
}
bool sums_16_bit_products(const AttentionSpec&) { return true; }
/// At 128 channels a block of 64 keys with lists may take turns, too: two then fit into 99 KB.
std::string objection_to_turns_of_dkv(const AttentionSpec& s, const TileConfig& t) {
  const bool of_lists = is_sparse(s) && wide(s) && !widest(s) && t.block_kv == 64;
  if (t.stages == 0 && of_lists && t.family == Family::mma && !blockwise(s) &&
      s.precision == Precision::six_of_seven)
    return "";
  return objection_to_turns(s, t);
}
std::vector<Output> outputs_of_dkv(const AttentionSpec& s, const Problem& p) {
  const int64_t keys = p.batch * p.heads_kv * p.seq_kv;
  return {{O::dk, keys * s.head_dim, Output::elements},
          {O::dv, keys * s.head_dim, Output::elements}};
}

const Tiling kBackwardDkv = {
    .pass = Pass::backward,
    .blocks_own_keys = true,
    .stages = {0, 1, 2},
    .shared_bytes = bytes_of_dkv<false>,
    .objection = objection_to_turns_of_dkv,
    .accumulators = accumulators_of_dkv,
    .sums_16_bit_products = sums_16_bit_products,
    .outputs = outputs_of_dkv,
};

Tiling tiling_of_dkv_ws() {
  Tiling tiling = kBackwardDkv;
  tiling.warps = {8, 12};
  tiling.stages = {2, 4};
  tiling.shared_bytes = bytes_of<BackwardDkvWsLayout>;
  tiling.objection = [](const AttentionSpec& s, const TileConfig& t) -> std::string {
    if (scores16(s) || blockwise(s))
      return "it is built for 8-bit scores under '" + value_text(Granularity::row) +
             "'; the family wgmma has the others";
    if (width(s) > kWidestFused)
      return too_wide(s);
    if (is_sparse(s) && (mask_depends_on_head(s) || score_depends_on_head(s)))
      return "over lists its consumers do not know whose queries a tile has, which the mask or the "
             "score function depends on; the family wgmma has it";
    if (wide(s) && t.warps == 12)
      return "registers do not suffice for three warpgroups at 128 channels";
    return "";
  };
  return tiling;
}
const Tiling kBackwardDkvWs = tiling_of_dkv_ws();

int bytes_of_pair(const AttentionSpec& s, const TileConfig& t) {
  if (very_wide(s))
    return bytes_of<HalvesLayout>(s, t);
  return which_int8(s.precision).dk ? bytes_of<BackwardDkvPairLayout>(s, t)
                                    : bytes_of<BackwardDkvPair16Layout>(s, t);
}

Tiling tiling_of_dkv_pair() {
  Tiling tiling = kBackwardDkv;
  tiling.warps = {8};
  tiling.tokens_a_warp = 8;
  tiling.stages = {1};
  tiling.shared_bytes = bytes_of_pair;
  tiling.accumulators = [](const AttentionSpec& s, Family family) {
    return very_wide(s) ? width(s) / 4 + 2 * 32 : accumulators_of_dkv(s, family);
  };
  tiling.objection = [](const AttentionSpec& s, const TileConfig& t) -> std::string {
    const Int8Products int8 = which_int8(s.precision);
    if (int8.dk != int8.dv)
      return "it forms both dK and dV in INT8 or in 16 bits; the family wgmma has the others";
    return objection_to_pair(s, t);
  };
  return tiling;
}
const Tiling kBackwardDkvPair = tiling_of_dkv_pair();

const Tiling kBackward = {
    .pass = Pass::backward,
    .blocks_own_keys = true,
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          return which_int8(s.precision).dq ? bytes_of<BackwardFusedLayout>(s, t)
                                            : bytes_of_dkv<true>(s, t);
        },
    .objection =
        [](const AttentionSpec& s, const TileConfig& t) {
          if (width(s) > kWidestFused)
            return too_wide(s);
          if (!may_fuse_backward(s))
            return "under '" + value_text(Granularity::block) + "' it takes precision '" +
                   value_text(Precision::gradients16) +
                   "', and in 16 bits it sums dQ in no order: "
                   "no 'deterministic'";
          if (sums_dq_in_fp16(s))
            return "it adds up dQ in FP32: dq_sums '" + value_text(s.dq_sums) +
                   "' is built by the family '" + value_text(Family::ws) + "' alone";
          const Int8Products int8 = which_int8(s.precision);
          if (!int8.dq)
            return std::string();
          if (!int8.dv)
            return "precision '" + value_text(s.precision) + "' has a split backward alone";
          return t.block_kv != 128 || s.group_kv != 128 || t.stages != 1
                     ? "it has one stage, and takes the 128 keys of a quantisation group, which "
                       "share a query's scale of dS"
                     : std::string();
        },
    .accumulators = accumulators_of_dkv, // dQ comes after P and dS, and needs fewer than they do
    .sums_16_bit_products = sums_16_bit_products,
    .outputs = outputs_of_dkv,
};

void configure_dkv(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  c.add("WITH_DQ", k.kind == KernelKind::backward);
  const AttentionSpec& s = k.attention;
  const int steps = width(s) / 16;
  // If `halved`, dP's product is unrolled by half: unrolled fully, it needs a few more than the 255
  // registers that a thread can have.
  const bool masked = k.arch.is_consumer_blackwell() && bounded_behind(s) && !blockwise(s) &&
                      s.precision == Precision::six_of_seven;
  const bool halved = width(s) > kWidestFused ? k.arch.has_wgmma() || k.arch.is_blackwell()
                                              : k.arch.is_blackwell() && wide(s) &&
                                                    (s.sink_keys == 0 || masked || s.packed);
  const bool fused_in_int8 = k.kind == KernelKind::backward &&
                             k.tile.family.instruction() == Instruction::mma &&
                             which_int8(s.precision).dq;
  // On sm_86 and sm_89 the fused kernel spills 20 bytes if FP16 sums of dP are unrolled fully.
  const int unroll = fused_in_int8 ? (sums_dp_in_fp16(s) && wide(s) ? steps / 4 : steps)
                     : halved      ? steps / 2
                                   : steps;
  configure_operands(c, k, /*score_rows_in_registers=*/fused_in_int8 && !scores16(s), unroll);
  // LEAN_COPIES leaves registers free, which ptxas needs for wgmma's accumulators. With mma.sync
  // ptxas makes worse code from lean copies, except on consumer Blackwell and, in the fused kernel
  // of 16-bit gradients, on every Blackwell.
  const bool with_dq = k.kind == KernelKind::backward;
  const bool lean =
      !fused_in_int8 && (k.arch.is_consumer_blackwell() || (with_dq && k.arch.is_blackwell()));
  const bool spills_else = k.arch.is_thor() && scores16(s); // 8 bytes with a mask
  c.add("LEAN_COPIES",
        k.tile.family.instruction() != Instruction::mma || (wide(s) ? lean : spills_else));
}

void narrow_dkv(AttentionSpec& s) {
  const DpSums given = s.dp_sums;
  narrow(s);
  s.dp_sums = given;
}
void narrow_fused(AttentionSpec& s) {
  const AttentionSpec given = s;
  narrow_dkv(s);
  if (!orders_dq(s)) // else it does so for everybody
    s.deterministic = given.deterministic;
  s.dq_sums = given.dq_sums;
}

/// The kernel round_dq does not depend on the precision: the sums of dQ in memory have no channel
/// scales.
void narrow_round_dq(AttentionSpec& s) {
  const DqSums given = s.dq_sums;
  narrow(s);
  s.precision = Precision::gradients16;
  s.smooth_q = AttentionSpec().smooth_q, s.rotate = AttentionSpec().rotate;
  if (given == DqSums::fp16) // a spec with FP16 sums is not deterministic
    s.dq_sums = given, s.deterministic = false;
}

void configure_round_dq(Configuration& c, const KernelSpec& k) {
  configure_spec(c, k.attention);
  c.add("DQ_SUM16", sums_dq_in_fp16(k.attention));
  c.add("BLOCK_Q", kTokensPerTile);
  c.add("BLOCK_KV", 0); // it has no keys
  c.add("STAGES", 1);
  c.add("LEAN_COPIES", false);
}

} // namespace

KernelDefinition backward_dkv(Family family) {
  const ParamFields fields = fields_named(
      {O::q,      O::k,          O::v,         O::dout,         O::dk,          O::dv,
       O::q8,     O::q_rows,     O::k8,        O::k8_scale,     O::qt8,         O::qt8_scale,
       O::dot8,   O::dot8_scale, O::dout_rows, O::sink_partial, O::tile_p_max,  O::tile_ds_max,
       O::k_rows, O::kt8,        O::kt8_scale, O::dq_sum,       O::mean_scores, O::q_mean});
  return {
      .kind = KernelKind::backward_dkv,
      .of = Backward::split,
      .family = family,
      .passes = {Pass::backward},
      .narrow = narrow_dkv,
      .fields = fields,
      .half_fields = fields_and(fields, {O::half_v, O::half_dout, O::dp_factor}),
      .root_template = "kernels/backward_dkv.cuh",
      .configure = configure_dkv,
      .threads = threads,
      .grid = grid,
      .tiling = &kBackwardDkv,
  };
}

KernelDefinition backward_dkv_ws() {
  KernelDefinition specialised = backward_dkv(Family::ws);
  specialised.half_fields.clear();
  specialised.fields =
      fields_named({O::dk, O::dv, O::q8, O::q_rows, O::k8, O::k8_scale, O::qt8, O::qt8_scale,
                    O::dot8, O::dot8_scale, O::dout_rows, O::q_map, O::v_map, O::dout_map,
                    O::v_rows, O::query_rows, O::sink_partial});
  specialised.root_template = "kernels/backward_dkv_ws.cuh";
  specialised.tiling = &kBackwardDkvWs;
  return specialised;
}

KernelDefinition backward_dkv_pair() {
  KernelDefinition paired = backward_dkv_ws();
  paired.family = Family::pair;
  paired.root_template = "kernels/backward_dkv_pair.cuh";
  paired.root_template16 = "kernels/backward_dkv_pair16.cuh";
  paired.very_wide_template = "kernels/backward_dkv_halves.cuh";
  paired.grid = [](const KernelSpec& k, const Problem& p) -> Grid {
    Grid grid = attention::grid(k, p);
    if (very_wide(k.attention)) // one block forms dK, its neighbour dV
      grid.y *= 2;
    return grid;
  };
  paired.tiling = &kBackwardDkvPair;
  return paired;
}

KernelDefinition backward(Family family) {
  KernelDefinition fused = backward_dkv(family);
  fused.kind = KernelKind::backward;
  fused.of = Backward::fused;
  fused.narrow = narrow_fused;
  fused.fields = fields_and(fused.fields, {O::dq_turns});
  fused.half_fields = fields_and(fused.half_fields, {O::dq_turns});
  fused.root_template = "kernels/backward_fused.cuh";
  fused.root_template16 = "kernels/backward_dkv.cuh";
  fused.tiling = &kBackward;
  return fused;
}

KernelDefinition round_dq() {
  return {
      .kind = KernelKind::round_dq,
      .of = Backward::fused,
      .passes = {Pass::backward},
      .narrow = narrow_round_dq,
      .fields = fields_named({O::k, O::dq, O::dlse, O::k_mean, O::q_rows, O::dq_sum, O::dq_factor}),
      .root_template = "kernels/round_dq.cuh",
      .configure = configure_round_dq,
      .threads = [](const KernelSpec&) { return kTokensPerTile / 16 * 32; },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        const AttentionSpec& s = k.attention;
        return {places(Tokens::queries, kTokensPerTile, s, p), p.heads, sequences_apart(s, p)};
      },
  };
}

} // namespace sagebwd::attention
