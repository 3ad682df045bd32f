//===- kernel.cpp - Kernel names, tiles and their shared memory -------------===//

#include "generator/kernel.h"

#include <array>
#include <cstdio>

namespace sagebwd {
namespace {

constexpr std::array<std::string_view, 9> kKindNames = {
    "key_mean_partial", "key_mean", "quantize_q",  "quantize_k",  "quantize_v",
    "quantize_dout",    "forward",  "backward_dq", "backward_dkv"};

bool is_attention(KernelKind kind) { return kind >= KernelKind::forward; }
/// The kernels of the keys' mean are the same in both passes and under every option.
bool is_mean(KernelKind kind) { return kind <= KernelKind::key_mean; }

/// Bytes of a token of Q or K for S, and of a token of V or dO.
int score_row(const AttentionSpec& s) {
  return s.precision == Precision::qk16 ? 2 * s.head_dim : s.head_dim;
}
int value_row(const AttentionSpec& s) { return 2 * s.head_dim; }

std::string describe(const TileConfig& tile) { return "'" + to_string(tile) + "'"; }

} // namespace

std::string_view to_string(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
std::string_view to_string(KernelKind kind) { return kKindNames[static_cast<size_t>(kind)]; }

std::string_view to_string(Family family) { return family == Family::mma ? "mma" : "wgmma"; }

std::string to_string(const TileConfig& t) {
  return std::string(to_string(t.family)) + " " + std::to_string(t.block_q) + "x" +
         std::to_string(t.block_kv) + " w" + std::to_string(t.warps) + " s" +
         std::to_string(t.stages) + " b" + std::to_string(t.blocks_per_sm);
}

TileConfig parse_tile(std::string_view text) {
  TileConfig t;
  const std::string s(text);
  char family[8] = "";
  int end = 0;
  const int read = std::sscanf(s.c_str(), "%7s %6dx%6d w%6d s%6d b%6d%n", family, &t.block_q,
                               &t.block_kv, &t.warps, &t.stages, &t.blocks_per_sm, &end);
  t.family = family == to_string(Family::wgmma) ? Family::wgmma : Family::mma;
  if (read != 6 || static_cast<size_t>(end) != s.size() || family != to_string(t.family))
    throw SpecError("cannot read tile '" + s +
                    "': expected the family (mma or wgmma), block_q x block_kv, warps, stages and "
                    "blocks per SM, as in 'mma 128x64 w8 s2 b1'");
  return t;
}

std::string kernel_name(const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  std::string name = "sagebwd_" + std::string(to_string(k.kind)) + "_d" +
                     std::to_string(s.head_dim) + "_" + std::string(to_string(s.dtype));
  if (is_mean(k.kind))
    return name;
  if (!is_attention(k.kind))
    name += "_" + std::string(to_string(k.pass));
  else if (s.causal != Causal::none)
    name += "_causal";
  name += "_" + std::string(to_string(s.granularity)) + std::to_string(s.group_q) + "x" +
          std::to_string(s.group_kv);
  if (s.precision == Precision::qk16)
    name += "_qk16";
  if (!s.smooth_k)
    name += "_unsmoothed";
  if (!s.rotate && s.precision != Precision::qk16)
    name += "_unrotated";
  if (is_attention(k.kind))
    name += "_" + std::string(to_string(k.tile.family)) + "_" + std::to_string(k.tile.block_q) +
            "x" + std::to_string(k.tile.block_kv) + "_w" + std::to_string(k.tile.warps) + "_s" +
            std::to_string(k.tile.stages) + "_b" + std::to_string(k.tile.blocks_per_sm);
  return name;
}

std::vector<std::pair<std::string, std::string>> labelled(const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const auto yes_no = [](bool value) { return std::string(value ? "yes" : "no"); };
  std::vector<std::pair<std::string, std::string>> fields = {
      {"kind", std::string(to_string(k.kind))},
      {"head_dim", std::to_string(s.head_dim)},
      {"dtype", std::string(to_string(s.dtype))},
  };
  if (is_mean(k.kind))
    return fields;
  fields.insert(fields.end(), {{"pass", std::string(to_string(k.pass))},
                               {"causal", std::string(to_string(s.causal))},
                               {"granularity", std::string(to_string(s.granularity))},
                               {"precision", std::string(to_string(s.precision))},
                               {"smooth_k", yes_no(s.smooth_k)},
                               {"rotate", yes_no(s.rotate)},
                               {"deterministic", yes_no(s.deterministic)},
                               {"group_q", std::to_string(s.group_q)},
                               {"group_kv", std::to_string(s.group_kv)}});
  if (is_attention(k.kind)) {
    fields.emplace_back("family", to_string(k.tile.family));
    fields.emplace_back("block_q", std::to_string(k.tile.block_q));
    fields.emplace_back("block_kv", std::to_string(k.tile.block_kv));
    fields.emplace_back("warps", std::to_string(k.tile.warps));
    fields.emplace_back("stages", std::to_string(k.tile.stages));
    fields.emplace_back("blocks_per_sm", std::to_string(k.tile.blocks_per_sm));
  }
  return fields;
}

int shared_bytes(KernelKind kind, const AttentionSpec& s, const TileConfig& t) {
  const int d = s.head_dim, tokens = 64;
  const bool block = s.granularity == Granularity::block;
  switch (kind) {
  case KernelKind::forward: // Q; stages of K, transposed V and their scales
    return t.block_q * score_row(s) +
           t.stages * (s.group_kv * score_row(s) + d * s.group_kv + s.group_kv * 4 + d * 4);
  case KernelKind::backward_dq: // Q, dO; stages of K, V, transposed K and scales; block maxima
    return t.block_q * (score_row(s) + value_row(s)) +
           t.stages * (s.group_kv * (score_row(s) + value_row(s)) + d * s.group_kv +
                       s.group_kv * 4 + d * 4) +
           (block ? 2 * t.warps * 8 : 0);
  case KernelKind::backward_dkv: // K, V; stages of Q, dO, transposed Q and dO, vectors, scales
    return t.block_kv * (score_row(s) + value_row(s)) +
           t.stages * (tokens * (score_row(s) + value_row(s)) + 2 * d * tokens + 3 * tokens * 4 +
                       2 * d * 4);
  default:
    return 0;
  }
}

std::string objection(KernelKind kind, const AttentionSpec& s, const TileConfig& t,
                      const Arch& arch) {
  const bool keys = kind == KernelKind::backward_dkv;
  const int walked = keys ? 64 : s.group_kv, rows = keys ? t.block_kv : t.block_q;
  if (t.family == Family::wgmma && arch.name != "sm_90a")
    return "wgmma exists on sm_90a alone; elsewhere the family is mma";
  if ((t.warps != 4 && t.warps != 8) || rows != 16 * t.warps)
    return "a block takes 64 " + std::string(keys ? "keys" : "queries") +
           " with 4 warps or 128 with 8";
  if ((keys ? t.block_q : t.block_kv) != walked)
    return "this kernel walks over " + std::to_string(walked) + (keys ? " queries" : " keys") +
           " at a time";
  if (t.stages < 1 || t.stages > 2)
    return "1 or 2 stages are supported";
  if (t.blocks_per_sm < 1 || t.blocks_per_sm > 8)
    return "1 to 8 blocks per SM are supported";
  if (kind == KernelKind::backward_dq && s.granularity == Granularity::block &&
      t.block_q != s.group_q)
    return "under 'block' the tile must be the group of " + std::to_string(s.group_q) + " queries";
  if (shared_bytes(kind, s, t) > arch.max_shared_bytes)
    return "it needs " + std::to_string(shared_bytes(kind, s, t)) + " bytes of shared memory and " +
           std::string(arch.name) + " has " + std::to_string(arch.max_shared_bytes) + " per block";
  return "";
}

namespace {

/// The spec as one kernel sees it: what it does not depend on is set to one value, so that specs
/// share kernels. Where the causal diagonal lies is an argument.
AttentionSpec needed_by(KernelKind kind, AttentionSpec s) {
  s.deterministic = true;
  if (s.precision == Precision::qk16) // nothing is rotated but Q and K for INT8 scores
    s.rotate = false;
  if (!is_attention(kind))
    s.causal = Causal::none;
  else if (s.causal == Causal::bottom_right)
    s.causal = Causal::top_left;
  return s;
}

} // namespace

void check_tile(const KernelSpec& k) {
  if (!is_attention(k.kind))
    return;
  const std::string why = objection(k.kind, k.attention, k.tile, k.arch);
  if (!why.empty())
    throw SpecError("tile " + describe(k.tile) + " does not suit " +
                    std::string(to_string(k.kind)) + " of " + to_string(k.attention) + " on " +
                    std::string(k.arch.name) + ": " + why);
}

TileConfig default_tile(KernelKind kind, const AttentionSpec& s, const Arch& arch) {
  if (!is_attention(kind))
    return {};
  const bool keys = kind == KernelKind::backward_dkv, wide = s.head_dim > 64;
  const bool forward = kind == KernelKind::forward, wgmma = arch.name == "sm_90a";
  const bool scores8 = s.precision == Precision::six_of_seven, group128 = s.group_kv == 128;
  TileConfig tile;
  tile.family = wgmma ? Family::wgmma : Family::mma;
  // Small blocks, several to an SM, hide each other's waits: tuned on an H200 they beat larger
  // blocks and deeper pipelines. As many as the registers allow without spills.
  const bool third = !wide || (forward ? scores8 : !keys && !scores8 && !group128);
  tile.blocks_per_sm = wgmma && third ? 3 : 2;
  tile.stages = wgmma && wide && forward && scores8 && group128 ? 2 : 1; // else the third spills
  std::string why;
  for (int warps : {4, 8}) {
    tile.warps = warps;
    tile.block_q = keys ? 64 : 16 * warps;
    tile.block_kv = keys ? 16 * warps : s.group_kv;
    why = objection(kind, s, tile, arch);
    if (why.empty())
      return tile;
    tile.blocks_per_sm = wgmma && !wide ? 2 : 1;
  }
  const bool block = s.granularity == Granularity::block;
  throw SpecError("no tile of " + std::string(to_string(kind)) + " fits " + to_string(s) + " on " +
                  std::string(arch.name) + ": for " + describe(tile) + ", " + why + "; take " +
                  (block ? "'row'" : "group_kv = 64") + ", another GPU, or precision six-of-seven");
}

Tiles default_tiles(const AttentionSpec& spec, const Arch& arch) {
  const AttentionSpec s = resolved(spec, arch);
  return {default_tile(KernelKind::forward, s, arch),
          default_tile(KernelKind::backward_dq, s, arch),
          default_tile(KernelKind::backward_dkv, s, arch)};
}

namespace {

std::vector<KernelKind> kinds_of(Pass pass, const AttentionSpec& s) {
  const bool scores8 = s.precision == Precision::six_of_seven;
  std::vector<KernelKind> kinds;
  // The mean serves the INT8 copies of K: for S, and transposed for dQ.
  if (s.smooth_k && (scores8 || pass == Pass::backward))
    kinds = {KernelKind::key_mean_partial, KernelKind::key_mean};
  if (scores8 || pass == Pass::backward)
    kinds.insert(kinds.end(), {KernelKind::quantize_q, KernelKind::quantize_k});
  if (pass == Pass::forward)
    kinds.insert(kinds.end(), {KernelKind::quantize_v, KernelKind::forward});
  else
    kinds.insert(kinds.end(),
                 {KernelKind::quantize_dout, KernelKind::backward_dq, KernelKind::backward_dkv});
  return kinds;
}

} // namespace

std::vector<KernelSpec> kernels_of(Pass pass, const AttentionSpec& spec, const Arch& arch) {
  // Not default_tiles(): a pass is to build where another's tiles do not fit.
  const AttentionSpec s = resolved(spec, arch);
  std::vector<KernelSpec> kernels;
  for (KernelKind kind : kinds_of(pass, s))
    kernels.push_back({kind, pass, needed_by(kind, s), arch, default_tile(kind, s, arch)});
  return kernels;
}

std::vector<KernelSpec> kernels_of(Pass pass, const AttentionSpec& spec, const Arch& arch,
                                   const Tiles& tiles) {
  const AttentionSpec s = resolved(spec, arch);
  std::vector<KernelSpec> kernels;
  for (KernelKind kind : kinds_of(pass, s)) {
    const TileConfig tile = kind == KernelKind::forward        ? tiles.forward
                            : kind == KernelKind::backward_dq  ? tiles.backward_dq
                            : kind == KernelKind::backward_dkv ? tiles.backward_dkv
                                                               : TileConfig{};
    kernels.push_back({kind, pass, needed_by(kind, s), arch, tile});
  }
  return kernels;
}

} // namespace sagebwd
