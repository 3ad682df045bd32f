//===- attention.cpp - The forward, dQ, and dK with dV ---------------------===//
//
// Each block owns queries (dK and dV: keys), 16 to a warp, and walks over keys (queries). The same
// templates serve mma.sync and wgmma.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"

#include <algorithm>

namespace sagebwd {
namespace {

using O = Operand;

bool scores16(const AttentionSpec& s) { return !which_int8(s.precision).s; }
bool blockwise(const AttentionSpec& s) { return grouping_of(s.granularity).one_scale; }
bool wide(const AttentionSpec& s) { return s.head_dim > 64; }

void narrow(AttentionSpec& s) {
  const AttentionSpec plain;
  s.deterministic = plain.deterministic; // every kernel is
  if (scores16(s))                       // nothing is rotated but Q and K for INT8 scores
    s.rotate = plain.rotate;
  if (s.causal == Causal::bottom_right) // where the diagonal lies is an argument
    s.causal = Causal::top_left;
}

/// The forward knows S in INT8 and S in 16 bits; the other products are the backward's.
void narrow_forward(AttentionSpec& s) {
  narrow(s);
  if (!scores16(s))
    s.precision = Precision::six_of_seven;
}

/// Bytes of a token of Q or K for S, and of a token of V or dO.
int score_row(const AttentionSpec& s) { return scores16(s) ? 2 * s.head_dim : s.head_dim; }
int value_row(const AttentionSpec& s) { return 2 * s.head_dim; }

/// An 8-bit A operand takes a quarter of its columns' registers. wgmma keeps the products of a
/// whole group apart until they are scaled; mma.sync forms 16 columns at a time.
int product_registers(const AttentionSpec& s, Family family) {
  return family == Family::wgmma ? s.head_dim / 2 : 8;
}

/// What all three are specialised by.
void configure_common(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  visit_mask(s, [&](auto... constant) { c.add(constant...); });
  const Int8Products int8 = which_int8(s.precision);
  c.add("QK16", !int8.s);
  c.add("DV16", !int8.dv);
  c.add("DQ16", !int8.dq);
  c.add("DK16", !int8.dk);
  c.add("SCALED_DOUT", scales_dout(s));
  c.add("SINK_KEYS", s.sink_keys);
  c.add("SMOOTH_K", s.smooth_k);
  c.add("USES_MEAN", s.smooth_k && !scores16(s));
  c.add("BLOCK_SCALES", blockwise(s));
  c.add("GROUP_Q", s.group_q);
  c.add("GROUP_KV", s.group_kv);
  c.add("CHANNEL_TOKENS_Q", channel_tokens_q(s));
  c.add("CHANNEL_TOKENS_KV", channel_tokens_kv(s));
  c.add("BLOCK_Q", k.tile.block_q);
  c.add("BLOCK_KV", k.tile.block_kv);
  c.add("STAGES", k.tile.stages);
  c.add("BLOCKS_PER_SM", k.tile.blocks_per_sm);
  c.add("SHARED_BYTES", definition_of(k).tiling->shared_bytes(s, k.tile));
}

/// A operands stay in registers where they leave room for the accumulators.
bool leaves_room(const KernelSpec& k) {
  return !wide(k.attention) && k.tile.blocks_per_sm * k.tile.warps <= 8;
}

void configure_operands(Configuration& c, const KernelSpec& k, bool score_rows_in_registers,
                        int value_unroll) {
  c.add("VALUE_UNROLL", value_unroll);
  c.add("SCORE_ROWS_IN_REGISTERS", score_rows_in_registers || leaves_room(k));
  c.add("VALUE_ROWS_IN_REGISTERS", leaves_room(k));
}

//===--- Forward -----------------------------------------------------------===//

const Tiling kForward = {
    .pass = Pass::forward,
    .blocks_own_keys = false,
    // Q; stages of K and transposed V; two units' scales of V's channels
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          return t.block_q * score_row(s) +
                 t.stages * (s.group_kv * score_row(s) + s.head_dim * s.group_kv) +
                 (blockwise(s) ? 0 : 2 * int{kChannelVectors} * s.head_dim * 4);
        },
    .objection = [](const AttentionSpec&, const TileConfig&) { return std::string(); },
    .preferred = [](const AttentionSpec& s, Family family) -> TileConfig {
      const bool wgmma = family == Family::wgmma, third = wgmma && !(wide(s) && scores16(s));
      // With one stage the third block spills there.
      return {.stages = third && wide(s) && s.group_kv == 128 ? 2 : 1,
              .blocks_per_sm = third ? 3 : 2};
    },
    // O; the group's scores, then its P in 8 bits and the products
    .accumulators =
        [](const AttentionSpec& s, Family family) {
          const int group = s.group_kv / 2;
          return s.head_dim / 2 + std::max(group, group / 4 + product_registers(s, family));
        },
    .sums_16_bit_products = scores16,
    .outputs = [](const AttentionSpec& s, const Problem& p) -> std::vector<Output> {
      const int64_t queries = p.batch * p.heads * p.seq_q;
      return {{O::out, queries * s.head_dim, Output::elements}, {O::lse, queries, Output::floats}};
    },
};

//===--- dQ ----------------------------------------------------------------===//

/// Of what tells precisions apart dQ knows S, its own product and which dO it reads.
void narrow_dq(AttentionSpec& s) {
  narrow(s);
  if (blockwise(s) && s.precision == Precision::dv16)
    s.precision = Precision::six_of_seven;
}

/// Whether registers hold the rows of Q and dO throughout, and shared memory only until keys come:
/// where 128 queries of 16 bits leave no room for keys in 99 KB. Elsewhere registers are short.
bool dq_holds_rows(const AttentionSpec& s, Family family) {
  return family == Family::mma && blockwise(s) && scores16(s);
}

const Tiling kBackwardDq = {
    .pass = Pass::backward,
    .blocks_own_keys = false,
    // Q and dO, while registers do not hold them; stages of 64 keys, values and scales; the group's
    // keys that dS meets; block maxima
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          const bool dq8 = which_int8(s.precision).dq;
          const int group = dq8 ? s.group_kv : kTokensPerTile;
          const int rows = t.block_q * (score_row(s) + value_row(s));
          const int keys =
              t.stages * kTokensPerTile * (score_row(s) + value_row(s)) +
              (t.stages == 2 && group == kTokensPerTile ? 2 : 1) * group *
                  (dq8 ? s.head_dim : value_row(s)) +
              (scores16(s) ? 0 : t.stages * static_cast<int>(kPadding / kKeysAScale) * 4) +
              (dq8 && blockwise(s) ? 2 * t.warps * 8 : 0);
          return dq_holds_rows(s, t.family) ? std::max(rows, keys) : rows + keys;
        },
    .objection =
        [](const AttentionSpec& s, const TileConfig& t) {
          return blockwise(s) && t.block_q != s.group_q
                     ? "under '" + value_text(s.granularity) + "' the tile must be the group of " +
                           std::to_string(s.group_q) + " queries"
                     : std::string();
        },
    .preferred = [](const AttentionSpec& s, Family family) -> TileConfig {
      const bool wgmma = family == Family::wgmma;
      const bool third = wgmma && !wide(s) && !scores16(s);
      // Two stages of 16-bit keys beside values leave no room for a second block at 128 channels.
      // With three blocks and a mask the second stage's addresses spill.
      const bool second = third ? s.causal == Causal::none : !(wide(s) && scores16(s));
      return {.stages = second ? 2 : 1, .blocks_per_sm = third ? 3 : 2};
    },
    // dQ; the group's dS and a tile's scores, then dS in 8 bits and the products
    .accumulators =
        [](const AttentionSpec& s, Family family) {
          const int group = s.group_kv / 2;
          return s.head_dim / 2 +
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

//===--- dK and dV ---------------------------------------------------------===//

const Tiling kBackwardDkv = {
    .pass = Pass::backward,
    .blocks_own_keys = true,
    // K, V; stages of Q and dO for S and dP, for dK and dV, and of vectors; scales of units
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          const Int8Products int8 = which_int8(s.precision);
          const int for_gradients =
              (int8.dk ? s.head_dim : value_row(s)) + (int8.dv ? s.head_dim : 0);
          constexpr int row_vectors = static_cast<int>(kRowVectors);
          constexpr int vectors = 2 * static_cast<int>(kChannelVectors);
          const bool units = !blockwise(s) && (int8.dk || int8.dv);
          const int slots = t.family == Family::wgmma && t.stages == 2 ? 3 : 2;
          return t.block_kv * (score_row(s) + value_row(s)) +
                 t.stages * kTokensPerTile *
                     (score_row(s) + value_row(s) + for_gradients + row_vectors * 4) +
                 (units ? slots * vectors * s.head_dim * 4 : 0);
        },
    .objection = [](const AttentionSpec&, const TileConfig&) { return std::string(); },
    .preferred = [](const AttentionSpec& s, Family family) -> TileConfig {
      const bool wgmma = family == Family::wgmma;
      // With 16-bit scores two stages spill or leave no room for a second block.
      return {.stages = scores16(s) || (!wgmma && wide(s)) ? 1 : 2,
              .blocks_per_sm = wgmma && !wide(s) && which_int8(s.precision).dk ? 3 : 2};
    },
    // dK and dV; a tile's P and dP, then dS, P in 8 bits and products
    .accumulators =
        [](const AttentionSpec& s, Family family) {
          const int tile = kTokensPerTile / 2;
          return s.head_dim + std::max(2 * tile, tile + tile / 4 + product_registers(s, family));
        },
    .sums_16_bit_products = [](const AttentionSpec&) { return true; },
    .outputs = [](const AttentionSpec& s, const Problem& p) -> std::vector<Output> {
      const int64_t values = p.batch * p.heads_kv * p.seq_kv * s.head_dim;
      return {{O::dk, values, Output::elements}, {O::dv, values, Output::elements}};
    },
};

//===--- The three ---------------------------------------------------------===//

Grid grid(const KernelSpec& k, const Problem& p) {
  return tiling_of(k.kind).blocks_own_keys
             ? Grid{blocks_of(p.seq_kv, k.tile.block_kv), blocks_of(p.heads_kv), blocks_of(p.batch)}
             : Grid{blocks_of(p.seq_q, k.tile.block_q), blocks_of(p.heads), blocks_of(p.batch)};
}

int threads(const KernelSpec& k) { return k.tile.warps * 32; }

bool in_forward(Pass pass, const AttentionSpec&) { return pass == Pass::forward; }
bool in_backward(Pass pass, const AttentionSpec&) { return pass == Pass::backward; }

void configure_forward(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  // At 128 channels ptxas' schedules for Blackwells leave no registers for them; reading them again
  // is one in seventeen reads of shared memory.
  const bool in_registers = !wide(k.attention) || k.arch.major < 10;
  configure_operands(c, k, in_registers, k.attention.head_dim / 16);
  // ptxas needs the registers for wgmma's accumulators; with mma.sync it makes worse use of them,
  // but for the forward at 128 channels.
  c.add("LEAN_COPIES", k.tile.family == Family::wgmma || wide(k.attention));
}

void configure_dq(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  const bool held = dq_holds_rows(k.attention, k.tile.family);
  c.add("VALUE_UNROLL", k.attention.head_dim / 16);
  c.add("SCORE_ROWS_IN_REGISTERS", held);
  c.add("VALUE_ROWS_IN_REGISTERS", held);
  // Of two loops with wgmma ptxas serialises the products (C7511), and at 128 channels it keeps
  // more addresses than there are registers.
  c.add("MASK_APART", k.tile.family == Family::mma && !wide(k.attention));
  c.add("LEAN_COPIES", false);
}

void configure_dkv(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  c.add("SINK_TOKENS", static_cast<int>(kQuantizedTokens));
  const AttentionSpec& s = k.attention;
  const int steps = s.head_dim / 16;
  // There a few more registers than there are would be needed to unroll dP's product.
  const bool halved = k.arch.major >= 10 && wide(s) && s.sink_keys == 0;
  configure_operands(c, k, /*score_rows_in_registers=*/false, halved ? steps / 2 : steps);
  // ptxas needs the registers for wgmma's accumulators; with mma.sync it makes worse use of them,
  // but for consumer Blackwell's schedule.
  c.add("LEAN_COPIES", k.tile.family == Family::wgmma || (k.arch.major == 12 && wide(s)));
}

// What ptxas is told with mma.sync, by time on an H200 and by spills elsewhere. Its scheduler, from
// level 2 on, forms all products of a tile before it adds any; at level 1 it keeps the order of the
// template (kernels/README.md).

std::vector<std::string> options_of_forward_mma(const KernelSpec& k) {
  if (!wide(k.attention) || k.arch.name == "sm_100")
    return {"--ptxas-options=-O1"};
  return {};
}

std::vector<std::string> options_of_dq_mma(const KernelSpec& k) {
  const bool datacentre_blackwell = k.arch.major == 10 || k.arch.major == 11;
  if (wide(k.attention) ? k.arch.major == 12 : datacentre_blackwell)
    return {"--ptxas-options=-O1"};
  const bool two_small_blocks = k.arch.name == "sm_80" || k.arch.name == "sm_87";
  if (wide(k.attention) && !two_small_blocks)
    return {"--ptxas-options=--register-usage-level=8"};
  return {};
}

std::vector<std::string> options_of_dkv_mma(const KernelSpec& k) {
  if (wide(k.attention))
    return {"--ptxas-options=-O1"};
  return {};
}

/// ptxas' own balance between speed and registers spills up to 20 bytes where three blocks share an
/// SM and dO is the caller's.
std::vector<std::string> options_of_gradients_wgmma(const KernelSpec& k) {
  if (!wide(k.attention) && k.attention.precision == Precision::dv16)
    return {"--ptxas-options=--register-usage-level=3"};
  return {};
}

std::vector<KernelDefinition> kernels_of(Family family) {
  return {
      {
          .kind = KernelKind::forward,
          .family = family,
          .differs_by_pass = false,
          .needed = in_forward,
          .narrow = narrow_forward,
          .fields = fields_named({O::q, O::k, O::v, O::out, O::lse, O::q8, O::q_rows, O::k8,
                                  O::k8_scale, O::vt8, O::vt8_scale}),
          .root_template = "kernels/forward.cuh",
          .configure = configure_forward,
          .threads = threads,
          .grid = grid,
          .compiler_options = family == Family::mma ? options_of_forward_mma : nullptr,
          .tiling = &kForward,
      },
      {
          .kind = KernelKind::backward_dq,
          .family = family,
          .differs_by_pass = false,
          .needed = in_backward,
          .narrow = narrow_dq,
          .fields = fields_named({O::q, O::k, O::v, O::dout, O::dq, O::dlse, O::k_mean, O::q8,
                                  O::q_rows, O::k8, O::k8_scale, O::kt8, O::kt8_scale, O::dout_rows,
                                  O::k_rows, O::tile_p_max, O::tile_ds_max}),
          .root_template = "kernels/backward_dq.cuh",
          .configure = configure_dq,
          .threads = threads,
          .grid = grid,
          .compiler_options =
              family == Family::mma ? options_of_dq_mma : options_of_gradients_wgmma,
          .tiling = &kBackwardDq,
      },
      {
          .kind = KernelKind::backward_dkv,
          .family = family,
          .differs_by_pass = false,
          .needed = in_backward,
          .narrow = narrow,
          .fields = fields_named({O::q, O::k, O::v, O::dout, O::dk, O::dv, O::q8, O::q_rows, O::k8,
                                  O::k8_scale, O::qt8, O::qt8_scale, O::dot8, O::dot8_scale,
                                  O::dout_rows, O::sink_partial, O::tile_p_max, O::tile_ds_max}),
          .root_template = "kernels/backward_dkv.cuh",
          .configure = configure_dkv,
          .threads = threads,
          .grid = grid,
          .compiler_options =
              family == Family::mma ? options_of_dkv_mma : options_of_gradients_wgmma,
          .tiling = &kBackwardDkv,
      },
  };
}

} // namespace

std::vector<KernelDefinition> attention_kernels() {
  std::vector<KernelDefinition> kernels;
  for (Family family : {Family::mma, Family::wgmma})
    for (KernelDefinition& kernel : kernels_of(family))
      kernels.push_back(std::move(kernel));
  return kernels;
}

} // namespace sagebwd
