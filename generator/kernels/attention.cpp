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

bool scores16(const AttentionSpec& s) { return s.precision == Precision::qk16; }
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
  c.add("QK16", scores16(s));
  c.add("SMOOTH_K", s.smooth_k);
  c.add("USES_MEAN", s.smooth_k && !scores16(s));
  c.add("BLOCK_SCALES", blockwise(s));
  c.add("GROUP_Q", s.group_q);
  c.add("GROUP_KV", s.group_kv);
  c.add("BLOCK_Q", k.tile.block_q);
  c.add("BLOCK_KV", k.tile.block_kv);
  c.add("WARPS", k.tile.warps);
  c.add("STAGES", k.tile.stages);
  c.add("BLOCKS_PER_SM", k.tile.blocks_per_sm);
  c.add("SHARED_BYTES", definition_of(k).tiling->shared_bytes(s, k.tile));
  // ptxas needs the registers for wgmma's accumulators; with mma.sync it makes worse use of them.
  c.add("LEAN_COPIES", k.tile.family == Family::wgmma);
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

/// Unrolled, the product over dK's and dV's values takes registers that they do not leave under
/// `block` at 128 channels. What does not spill differs among datacentre Blackwells.
int value_unroll_of_dkv(const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const bool blackwell = k.arch.major == 10 || k.arch.major == 11;
  const bool roomy =
      blackwell && s.causal != Causal::none && (scores16(s) || k.arch.name == "sm_103");
  if (wide(s) && blockwise(s) && !roomy)
    return blackwell ? 2 : 1;
  return s.head_dim / 16;
}

//===--- Forward -----------------------------------------------------------===//

const Tiling kForward = {
    .pass = Pass::forward,
    .blocks_own_keys = false,
    // Q; stages of K, transposed V and their scales
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          return t.block_q * score_row(s) +
                 t.stages * (s.group_kv * score_row(s) + s.head_dim * s.group_kv + s.group_kv * 4 +
                             s.head_dim * 4);
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

const Tiling kBackwardDq = {
    .pass = Pass::backward,
    .blocks_own_keys = false,
    // Q, dO; stages of K, V, transposed K and scales; block maxima
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          return t.block_q * (score_row(s) + value_row(s)) +
                 t.stages * (s.group_kv * (score_row(s) + value_row(s)) + s.head_dim * s.group_kv +
                             s.group_kv * 4 + s.head_dim * 4) +
                 (blockwise(s) ? 2 * t.warps * 8 : 0);
        },
    .objection =
        [](const AttentionSpec& s, const TileConfig& t) {
          return blockwise(s) && t.block_q != s.group_q
                     ? "under '" + value_text(s.granularity) + "' the tile must be the group of " +
                           std::to_string(s.group_q) + " queries"
                     : std::string();
        },
    .preferred = [](const AttentionSpec& s, Family family) -> TileConfig {
      const bool third = !wide(s) || (scores16(s) && s.group_kv != 128);
      return {.stages = 1, .blocks_per_sm = family == Family::wgmma && third ? 3 : 2};
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
      if (blockwise(s))
        for (O maxima : {O::tile_p_max, O::tile_ds_max})
          outputs.push_back({maxima, tiles, Output::floats, /*whole=*/false});
      return outputs;
    },
};

//===--- dK and dV ---------------------------------------------------------===//

const Tiling kBackwardDkv = {
    .pass = Pass::backward,
    .blocks_own_keys = true,
    // K, V; stages of Q, dO, transposed Q and dO, vectors, scales
    .shared_bytes =
        [](const AttentionSpec& s, const TileConfig& t) {
          return t.block_kv * (score_row(s) + value_row(s)) +
                 t.stages * (kTokensPerTile * (score_row(s) + value_row(s)) +
                             2 * s.head_dim * kTokensPerTile + 3 * kTokensPerTile * 4 +
                             2 * s.head_dim * 4);
        },
    .objection = [](const AttentionSpec&, const TileConfig&) { return std::string(); },
    .preferred = [](const AttentionSpec& s, Family family) -> TileConfig {
      return {.stages = 1, .blocks_per_sm = family == Family::wgmma && !wide(s) ? 3 : 2};
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
  configure_operands(c, k, /*score_rows_in_registers=*/true, k.attention.head_dim / 16);
}

void configure_dq(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  configure_operands(c, k, !scores16(k.attention) && k.attention.group_kv == 64,
                     k.attention.head_dim / 16);
}

void configure_dkv(Configuration& c, const KernelSpec& k) {
  configure_common(c, k);
  configure_operands(c, k, /*score_rows_in_registers=*/false, value_unroll_of_dkv(k));
}

/// ptxas' own balance between speed and registers spills a few bytes with mma.sync.
std::vector<std::string> options_of_dkv_mma(const KernelSpec&) {
  return {"--ptxas-options=--register-usage-level=0"};
}

std::vector<KernelDefinition> kernels_of(Family family) {
  return {
      {
          .kind = KernelKind::forward,
          .family = family,
          .differs_by_pass = false,
          .needed = in_forward,
          .narrow = narrow,
          .fields = fields_named({O::q, O::k, O::out, O::lse, O::q8, O::q_rows, O::k8, O::k8_scale,
                                  O::vt8, O::vt8_scale}),
          .root_template = "kernels/forward.cuh",
          .configure = configure_forward,
          .threads = threads,
          .grid = grid,
          .tiling = &kForward,
      },
      {
          .kind = KernelKind::backward_dq,
          .family = family,
          .differs_by_pass = false,
          .needed = in_backward,
          .narrow = narrow,
          .fields = fields_named({O::q, O::k, O::v, O::dout, O::dq, O::dlse, O::k_mean, O::q8,
                                  O::q_rows, O::k8, O::k8_scale, O::kt8, O::kt8_scale,
                                  O::tile_p_max, O::tile_ds_max}),
          .root_template = "kernels/backward_dq.cuh",
          .configure = configure_dq,
          .threads = threads,
          .grid = grid,
          .tiling = &kBackwardDq,
      },
      {
          .kind = KernelKind::backward_dkv,
          .family = family,
          .differs_by_pass = false,
          .needed = in_backward,
          .narrow = narrow,
          .fields = fields_named({O::q, O::k, O::v, O::dout, O::dk, O::dv, O::q8, O::q_rows, O::k8,
                                  O::k8_scale, O::qt8, O::dot8, O::q_channels, O::tile_p_max,
                                  O::tile_ds_max}),
          .root_template = "kernels/backward_dkv.cuh",
          .configure = configure_dkv,
          .threads = threads,
          .grid = grid,
          .compiler_options = family == Family::mma ? options_of_dkv_mma : nullptr,
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
