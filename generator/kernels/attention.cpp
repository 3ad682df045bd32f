//===- attention.cpp - What the attention kernels' definitions share --------===//

#include "generator/kernels/attention.h"
#include "generator/pointwise.h"

#include <algorithm>
#include <iterator>

namespace sagebwd {
namespace {

/// For another width, look at tile/prepass/rotation.cuh, tile/dq/dq_factor.cuh and
/// tile/prepass/scale_block.cuh first.
constexpr bool has_templates(int width) {
  return width == 64 || width == 128 || width == 256 || width == 512;
}
static_assert(std::all_of(std::begin(kWidths), std::end(kWidths), has_templates),
              "no template was written for one of these widths");

} // namespace
namespace attention {

void narrow(AttentionSpec& s) {
  const AttentionSpec plain;
  // Only the kernels of a fused backward depend on the first two fields, and only those that form
  // dP on the third; their narrow() restores them. The fourth one decides which kernels there are.
  s.deterministic = plain.deterministic;
  s.dq_sums = plain.dq_sums;
  s.dp_sums = plain.dp_sums;
  s.gradient_kernels = plain.gradient_kernels;
  if (scores16(s)) // only Q and K for INT8 scores are rotated
    s.rotate = plain.rotate;
  narrow_mask(s);
}

Grid grid(const KernelSpec& k, const Problem& p) {
  const bool of_keys = tiling_of(k.kind).blocks_own_keys;
  const Tokens own = of_keys ? Tokens::keys : Tokens::queries;
  const int tile = of_keys ? k.tile.block_kv : k.tile.block_q;
  const int64_t blocks = has_lists_of_queries(k) ? list_blocks(Tokens::keys, k.attention, p) *
                                                       (k.attention.sparse_kv / tile)
                                                 : places(own, tile, k.attention, p);
  return {blocks, channel_parts(k) * heads_of(own, p), sequences_apart(k.attention, p)};
}

int threads(const KernelSpec& k) {
  const Roles roles = k.tile.family.roles();
  return k.tile.warps * 32 + (roles == Roles::copier || roles == Roles::pairs ? 128 : 0);
}

void configure_spec(Configuration& c, const AttentionSpec& s) {
  visit_mask(s, [&](auto... constant) { c.add(constant...); });
  visit_lists(s, [&](auto... constant) { c.add(constant...); });
  const Int8Products int8 = which_int8(s.precision);
  c.add("QK16", !int8.s);
  c.add("DV16", !int8.dv);
  c.add("DQ16", !int8.dq);
  c.add("DK16", !int8.dk);
  c.add("SCALED_DOUT", scales_dout(s));
  c.add("SINK_KEYS", s.sink_keys);
  c.add("SMOOTH_K", s.smooth_k);
  c.add("SMOOTH_Q", s.smooth_q);
  c.add("USES_MEAN", s.smooth_k && !scores16(s));
  c.add("BENDS_SCORES", bends_scores(s));
  c.add("BLOCK_SCALES", blockwise(s));
  c.add("HAS_LISTS", is_sparse(s));
  c.add("GROUP_Q", s.group_q);
  c.add("GROUP_KV", s.group_kv);
  c.add("CHANNEL_TOKENS_Q", channel_tokens_q(s));
  c.add("CHANNEL_TOKENS_KV", channel_tokens_kv(s));
}
void configure_common(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  configure_spec(c, s);
  c.add("BLOCK_Q", k.tile.block_q);
  c.add("BLOCK_KV", k.tile.block_kv);
  c.add("STAGES", k.tile.stages);
  c.add("BLOCKS_PER_SM", k.tile.blocks_per_sm);
  const bool magic = k.kind == KernelKind::forward && !very_wide(s);
  c.add("MAGIC_SCORES", magic); // all tiles compute with MAGIC + score, for equal bits
  c.add("SCORES_FROM_MAGIC", magic && k.tile.family.roles() == Roles::copier);
  c.add("SHARED_BYTES", definition_of(k).tiling->shared_bytes(s, k.tile));
}

BlockShape shape_of(const AttentionSpec& s, const TileConfig& t) {
  const Int8Products int8 = which_int8(s.precision);
  return {.head_dim = width(s),
          .sum_channels = t.family.roles() == Roles::pairs && very_wide(s) ? width(s) / 2
                                                                           : gradient_channels(s),
          .block_q = t.block_q,
          .block_kv = t.block_kv,
          .stages = t.stages,
          .group_kv = s.group_kv,
          .channel_tokens_kv = channel_tokens_kv(s),
          .qk16 = !int8.s,
          .dv16 = !int8.dv,
          .dq16 = !int8.dq,
          .dk16 = !int8.dk,
          .block_scales = blockwise(s),
          .lists = is_sparse(s)};
}

std::string objection_to_pair(const AttentionSpec& s, const TileConfig& t) {
  if (width(s) <= kWidestFused)
    return "a pair of warpgroups shares out channels of wide heads, more than " +
           std::to_string(kWidestFused) + "; of " + std::to_string(s.head_dim) +
           " one holds the sums of all";
  if (scores16(s) || blockwise(s))
    return "it is built for 8-bit scores under '" + value_text(Granularity::row) +
           "'; the family wgmma has the others";
  return "";
}

std::string objection_to_turns(const AttentionSpec& s, const TileConfig& t) {
  if (t.stages != 0)
    return "";
  const bool formats =
      s.precision == Precision::six_of_seven || s.precision == Precision::gradients16;
  if (t.family == Family::mma && width(s) > kWidestFused && !blockwise(s) && formats)
    return "";
  return "with 0 stages parts of a tile take turns in shared memory, which is built by the family "
         "'" +
         value_text(Family::mma) + "' for more than " + std::to_string(kWidestFused) +
         " channels, '" + value_text(Granularity::row) + "' and precision '" +
         value_text(Precision::six_of_seven) + "' or '" + value_text(Precision::gradients16) + "'";
}

namespace {

/// Whether A operands can stay in registers and leave room for the accumulators.
bool leaves_room(const KernelSpec& k) {
  return !wide(k.attention) && k.tile.blocks_per_sm * k.tile.warps <= 8;
}

/// The definition for specs with lists of blocks, too.
KernelDefinition with_lists(KernelDefinition definition) {
  const auto listed = [of_queries =
                           definition.kind == KernelKind::backward_dkv](const ParamFields& fields) {
    const ParamFields all =
        fields_and(fields, {O::row_bits, O::row_stride_b, O::row_stride_h, O::column_bits});
    return of_queries ? fields_and(all, {O::key_order}) : all;
  };
  definition.listed_fields[0] = listed(definition.fields);
  if (!definition.half_fields.empty())
    definition.listed_fields[1] = listed(definition.half_fields);
  for (int half = 0; half < 2; ++half) {
    if (const ParamFields& fields = definition.listed_fields[half]; !fields.empty())
      definition.hiding_fields[half] =
          fields_and(fields_and(fields, {O::intervals, O::interval_stride_b, O::interval_stride_h}),
                     table_operands());
  }
  definition.score_fields = fields_and(definition.fields, table_operands());
  if (definition.kind == KernelKind::forward) {
    const ParamFields* const of[] = {&definition.fields, &definition.listed_fields[0],
                                     &definition.hiding_fields[0], &definition.score_fields};
    for (size_t i = 0; i < std::size(of); ++i)
      definition.max_logits_fields[i] = fields_and(*of[i], {O::max_logits});
  }
  return definition;
}

} // namespace

void configure_operands(Configuration& c, const KernelSpec& k, bool score_rows_in_registers,
                        int value_unroll) {
  c.add("VALUE_UNROLL", value_unroll);
  c.add("SCORE_ROWS_IN_REGISTERS", score_rows_in_registers || leaves_room(k));
  c.add("VALUE_ROWS_IN_REGISTERS", leaves_room(k));
}

} // namespace attention

std::vector<KernelDefinition> attention_kernels() {
  using namespace attention;
  // The first family of a kernel is the one that most GPUs have.
  return {with_lists(forward(Family::mma)),
          with_lists(forward(Family::wgmma)),
          with_lists(forward_ws()),
          forward_pair(),
          forward_team(),
          with_lists(backward_dq(Family::mma)),
          with_lists(backward_dq(Family::wgmma)),
          with_lists(backward_dq_ws()),
          backward_dq_pair(),
          backward_dq_team(),
          with_lists(backward_dkv(Family::mma)),
          with_lists(backward_dkv(Family::wgmma)),
          with_lists(backward_dkv_ws()),
          backward_dkv_pair(),
          backward_dkv_team(),
          backward(Family::mma),
          backward_ws(),
          round_dq()};
}

} // namespace sagebwd
