//===- definition.h - What the host knows about each kernel ----------------===//
//
// generator/kernels/ has one KernelDefinition for every kernel without tiles, and one for every
// family of every kernel with tiles. The generator, the launch, the workspace and the tuner read
// these definitions instead of naming kernels. A new kernel needs a KernelKind, a definition and a
// template. A new family of a kernel needs a definition and a template; its fields, threads and
// grid may differ from those of the kernel's other families.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/configuration.h"
#include "generator/plan.h"

#include <optional>

namespace sagebwd {

/// A tensor that a kernel with tiles writes. A tuner compares its values between tiles.
struct Output {
  Operand operand;
  int64_t values; ///< how many elements or floats, contiguous in memory
  enum Type { elements, floats } type;
  bool whole = true; ///< every value is written; false for maxima, which hidden tiles do not have
};

/// The part of a definition that only kernels with tiles have. Every AttentionSpec is resolved.
struct Tiling {
  Pass pass;
  bool blocks_own_keys;            ///< and walk over queries; if false, the other way round
  std::vector<int> warps = {4, 8}; ///< warps of a block that multiply: the possible numbers
  /// Owned tokens per warp; 8 or 4 if two or four warps own the same 16.
  int tokens_a_warp = 16;
  bool warpgroups_walk_alone = false; ///< each walks over what its 64 tokens see, not the block's
  std::vector<int> stages = {1, 2};
  int (*shared_bytes)(const AttentionSpec&, const TileConfig&);
  /// Why this kernel cannot be built with a tile; empty if it can. objection() of space.h checks
  /// what holds for all kernels.
  std::string (*objection)(const AttentionSpec&, const TileConfig&);
  /// The greatest number of FP32 or INT32 accumulators that a thread holds at one time. 16 rows by
  /// n columns of a warp are n / 2 of each thread.
  int (*accumulators)(const AttentionSpec&, Family);
  /// Whether the kernel sums 16-bit products. The bits of such sums depend on the order in which
  /// the matrix instruction adds.
  bool (*sums_16_bit_products)(const AttentionSpec&);
  std::vector<Output> (*outputs)(const AttentionSpec&, const Problem&);
};

struct KernelDefinition {
  KernelKind kind;
  Backward of = Backward::either; ///< the backward that it belongs to; `either`: to both
  Family family = {};             ///< of the kernel's tiles
  bool differs_by_pass = false;   ///< forward and backward have different kernels of this kind
  bool shares_dout = false;       ///< the backward's is another one beside linear attention
  std::vector<Pass> passes = {};  ///< those that launch it
  bool (*needed)(Pass, const AttentionSpec&) = nullptr; ///< whether they do so; null: always
  /// Sets every field that the kernel does not depend on to its default, so that several specs
  /// share one kernel.
  void (*narrow)(AttentionSpec&);
  ParamFields fields;                ///< of the kernel's Params struct, in order
  ParamFields half_fields = {};      ///< used instead if dP is summed in FP16; empty: `fields`
  ParamFields listed_fields[2] = {}; ///< the two of specs with lists of blocks; empty: none
  ParamFields hiding_fields[2] = {}; ///< those of specs that also hide or change single scores
  ParamFields score_fields = {};     ///< of specs without lists that change scores
  /// Those of specs with max_logits: the dense one, with lists, with lists that also hide or change
  /// single scores, and with a score function without lists.
  ParamFields max_logits_fields[4] = {};
  ParamFields smooth_v_fields = {};      ///< of a pre-pass that smooths V; empty: it does not
  std::string_view root_template;        ///< a path under templates/; it includes all other files
  std::string_view root_template16 = {}; ///< used instead if no gradient sums INT8 products
  std::string_view very_wide_template = {}; ///< used instead for very wide heads
  void (*configure)(Configuration&, const KernelSpec&);
  int (*threads)(const KernelSpec&);
  Grid (*grid)(const KernelSpec&, const Problem&);
  bool (*idle)(const KernelSpec&, const OperandValues&) = nullptr; ///< see is_idle(); null: never
  /// Whether, for specs with lists of blocks, a block takes the work of several, work tiles, one
  /// after the other (templates/tile/walk/tile_messages.cuh).
  bool takes_work_tiles = false;
  const Tiling* tiling = nullptr; ///< null: a kernel without tiles
  /// Of a kernel without tiles; null: it has none.
  int (*shared_bytes)(const KernelSpec&) = nullptr;
};

/// The number of channels of a result that one warp sums. Registers cannot hold the gradients of
/// all channels of a wide head (more than kWidestFused). So several blocks, or a pair of
/// warpgroups, divide the channels among themselves. Each of the blocks forms S and dP by itself.
/// Of very wide heads, whose warps are a team, this is the number for all warps of a block.
inline int sum_channels(KernelKind kind, const AttentionSpec& s) {
  const bool in_parts = kind == KernelKind::backward_dq || kind == KernelKind::backward_dkv;
  return in_parts && widest(s) && !very_wide(s) ? kWidestFused : width(s);
}

/// That of a kernel: the warpgroups of a pair have a half of a very wide head each.
inline int sum_channels(const KernelSpec& k) {
  const bool halves = k.tile.family.roles() == Roles::pairs && very_wide(k.attention);
  return halves ? width(k.attention) / 2 : sum_channels(k.kind, k.attention);
}

/// Whether blocks of keys have lists of queries. They are begun in the order of key_order.
inline bool has_lists_of_queries(const KernelSpec& k) {
  return is_sparse(k.attention) && k.kind == KernelKind::backward_dkv;
}

/// For kernels that depend on the tensors and on the sizes of blocks alone.
inline void narrow_to_lists(AttentionSpec& s) {
  s = {.head_dim = s.head_dim, .dtype = s.dtype, .sparse_q = s.sparse_q, .sparse_kv = s.sparse_kv};
}

inline bool is_part(const KernelSpec& k) { return k.channels == Channels::part; }
/// The number of blocks, neighbours in the grid, that divide a head's channels among themselves.
inline int channel_parts(const KernelSpec& k) {
  const bool in_pairs = k.tile.family.roles() == Roles::pairs;
  return in_pairs ? 1 : width(k.attention) / sum_channels(k.kind, k.attention);
}

/// The definition for this family. Without a family: the definition for any one of them, of which
/// callers may read only what all families share. All share `of`, `differs_by_pass`, `passes`,
/// `needed` and `narrow`, and of the tiling `pass`, `blocks_own_keys`, `sums_16_bit_products` and
/// `outputs`.
const KernelDefinition& definition_of(KernelKind, std::optional<Family> = std::nullopt);
const KernelDefinition& definition_of(const KernelSpec&);
/// The tiling of a kernel with tiles. Raises SpecError for a kernel without tiles.
const Tiling& tiling_of(KernelKind, std::optional<Family> = std::nullopt);
/// The families that build a kernel with tiles. Empty for a kernel without tiles.
std::vector<Family> families_of(KernelKind);
/// The template that a kernel is expanded from.
std::string_view root_template_of(const KernelSpec&);
const ParamFields& fields_of(const KernelSpec&);
/// The kernels of a pass in the order in which they are launched.
std::vector<KernelKind> launch_order(Pass, const ResolvedSpec&);
/// The kernels of the forward and of a split backward that have tiles: those of one pass, or all.
const std::vector<KernelKind>& tiled_kernels(std::optional<Pass> = std::nullopt);
/// The kernel of that name among tiled_kernels(). Raises SpecError, which lists them.
KernelKind parse_tiled_kernel(std::string_view name);

std::vector<KernelDefinition> key_mean_kernels();
std::vector<KernelDefinition> quantize_kernels();
std::vector<KernelDefinition> mean_scores_kernels();
std::vector<KernelDefinition> list_kernels();
std::vector<KernelDefinition> router_kernels();
std::vector<KernelDefinition> linear_kernels();
std::vector<KernelDefinition> estimated_kernels();
std::vector<KernelDefinition> front_kernels();
std::vector<KernelDefinition> attention_kernels();

} // namespace sagebwd
