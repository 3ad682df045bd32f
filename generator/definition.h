//===- definition.h - All that the host knows of each kernel ---------------===//
//
// One entry a kernel, and where it has tiles one for each family of them, in generator/kernels/:
// the generator, the launch, the workspace's users and the tuner ask it and never the kernel's
// name. A new kernel is a KernelKind, an entry and a template; a new family of one is a Family, an
// entry and a template, whose fields, threads and grid may be its own.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/configuration.h"
#include "generator/plan.h"

#include <optional>

namespace sagebwd {

/// A tensor that a tiled kernel writes, as a tuner compares it between tiles.
struct Output {
  Operand operand;
  int64_t values; ///< contiguous elements, or floats
  enum Type { elements, floats } type;
  bool whole = true; ///< every value is written; not so the maxima of tiles that nobody sees
};

/// What a kernel with tiles adds. The specs are resolved.
struct Tiling {
  Pass pass;
  bool blocks_own_keys;               ///< and walk over queries; else the other way round
  std::vector<int> warps = {4, 8};    ///< that multiply, in a block
  int tokens_a_warp = 16;             ///< queries or keys of a block; 8 where two own the same 16
  bool warpgroups_walk_alone = false; ///< each over what its own 64 tokens see, not the block's
  std::vector<int> stages = {1, 2};
  int (*shared_bytes)(const AttentionSpec&, const TileConfig&);
  /// Beyond what holds for all of them, why a tile cannot be built; empty where it can.
  std::string (*objection)(const AttentionSpec&, const TileConfig&);
  /// Values of FP32 or INT32 a thread holds at one time: a warp's 16 rows by n columns are n / 2.
  int (*accumulators)(const AttentionSpec&, Family);
  /// Whether it sums 16-bit products, whose bits depend on the order of the matrix instruction.
  bool (*sums_16_bit_products)(const AttentionSpec&);
  std::vector<Output> (*outputs)(const AttentionSpec&, const Problem&);
};

/// Of which backward a kernel is: dQ in a kernel of its own, or all gradients in one.
enum class Backward { either, split, fused };

struct KernelDefinition {
  KernelKind kind;
  Backward of = Backward::either;
  Family family = {};   ///< of its tiles
  bool differs_by_pass; ///< the passes that launch it have kernels of their own
  bool (*needed)(Pass, const AttentionSpec&);
  /// The spec as the kernel sees it: what it does not depend on is the default, so that specs share
  /// kernels.
  void (*narrow)(AttentionSpec&);
  std::vector<Field> fields;             ///< of its Params struct, in order
  std::string_view root_template;        ///< under templates/; its includes bring the rest
  std::string_view root_template16 = {}; ///< another where no sum is of INT8 products
  void (*configure)(Configuration&, const KernelSpec&);
  int (*threads)(const KernelSpec&);
  Grid (*grid)(const KernelSpec&, const Problem&);
  bool (*idle)(const KernelSpec&, const OperandValues&) = nullptr; ///< none: never
  const Tiling* tiling = nullptr;                                  ///< none: a kernel without tiles
};

/// Channels of its results that one warp sums. Of wide heads the gradients of all channels are
/// more than registers hold: so many blocks as it takes share them out, each with S and dP of its
/// own, or a pair of warpgroups.
inline int sum_channels(KernelKind kind, const AttentionSpec& s) {
  const bool in_parts = kind == KernelKind::backward_dq || kind == KernelKind::backward_dkv;
  return in_parts && width(s) > kWidestFused ? kWidestFused : width(s);
}

inline bool is_part(const KernelSpec& k) { return k.channels == Channels::part; }
/// Neighbours in the grid that share a head's channels out.
inline int channel_parts(const KernelSpec& k) {
  const bool in_pairs = k.tile.family == Family::pair;
  return in_pairs ? 1 : width(k.attention) / sum_channels(k.kind, k.attention);
}

/// The template that a kernel is expanded from.
std::string_view root_template_of(const KernelSpec&);

/// With a family, its own; without, one of them: for what they share, which is the pass, what is
/// needed when, what a kernel depends on, whose tokens blocks own, and the outputs.
const KernelDefinition& definition_of(KernelKind, std::optional<Family> = std::nullopt);
const KernelDefinition& definition_of(const KernelSpec&);
/// The tiling of a kernel that has tiles. Raises SpecError for another.
const Tiling& tiling_of(KernelKind, std::optional<Family> = std::nullopt);
/// The families that build a kernel; none for one without tiles.
std::vector<Family> families_of(KernelKind);

// In generator/kernels/:
std::vector<KernelDefinition> key_mean_kernels();
std::vector<KernelDefinition> quantize_kernels();
std::vector<KernelDefinition> mean_scores_kernels();
std::vector<KernelDefinition> attention_kernels();

} // namespace sagebwd
