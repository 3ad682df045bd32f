//===- operation.h - The kernels of one attention operation ----------------===//
#pragma once

#include "generator/choice.h"
#include "generator/plan.h"

namespace sagebwd {

/// The kernels, each name once. Some kernels serve both passes, so a list of all kernels of both
/// passes can name a kernel twice.
std::vector<KernelSpec> each_once(const std::vector<KernelSpec>&);

/// Whether there are kernels of the linear branch, and of an estimated alpha, for a spec: with
/// lists, of 64 or 128 channels.
bool has_linear_kernels(const AttentionSpec&);
/// The kernels of a spec that no pass launches: those of norm, RoPE and gates; with lists those
/// that pack them and, where there are such, those of the linear branch and of an estimated alpha.
std::vector<KernelSpec> kernels_beside(const ResolvedSpec&, const Arch&);

/// The problem of a packed call as that of a batch of sequences of their mean length; every other
/// problem as it is.
Problem of_mean_lengths(const AttentionSpec&, Problem);

/// Whether two kernels form the gradients of such a call faster than one, where one is the default
/// (default_fused_tile()) and faster for long calls. The spec is resolved.
bool split_is_faster(const AttentionSpec&, const Arch&, const Problem&);
/// Whether there are calls for which split_is_faster().
bool split_may_be_faster(const AttentionSpec&, const Arch&);

/// The kernels that an operation launches on an architecture, with the given tiles, and with
/// default tiles for all other kernels. The constructor decides whether one kernel forms all
/// gradients.
class Operation {
public:
  /// A given tile of KernelKind::backward makes the backward fused. If there is none, a given tile
  /// of backward_dq or backward_dkv makes the backward split. If none of the three is given,
  /// the spec's gradient_kernels decide or, if they say `any`, default_fused_tile(). Raises
  /// SpecError if given tiles contradict the spec, if no tile of a fused backward fits, or if the
  /// resulting backward cannot sum dQ or dP in the format that the spec asks for.
  Operation(const ResolvedSpec&, const Arch&, const Tiles& given = {});

  /// The spec that the caller asked for.
  const ResolvedSpec& spec() const { return spec_; }
  /// The spec that the kernels are built for. A split backward is always deterministic, so that
  /// `deterministic` is then set, even if spec() does not ask for that. gradient_kernels say which
  /// backward it is.
  const ResolvedSpec& built() const { return built_; }
  const Arch& arch() const { return arch_; }
  /// Whether one kernel forms all gradients.
  bool fused() const { return fused_tile_.has_value(); }
  /// Nothing, or the same operation with two kernels of the gradients, which calls have that are so
  /// short that these are faster (split_is_faster()).
  std::optional<Operation> of_short_calls() const;
  /// The operation that a call has: this one, or of_short_calls().
  Operation for_call(const Problem&) const;

  /// The kernels of a pass, in launch order. Raises SpecError if no tile fits one of them.
  std::vector<KernelSpec> kernels(Pass) const;
  /// The kernels of a pass for calls of any length, each once.
  std::vector<KernelSpec> kernels_of_any_call(Pass) const;
  /// The kernels for calls of any length of the forward and, if `backward`, of the backward, each
  /// once.
  std::vector<KernelSpec> distinct_kernels(bool backward = true) const;
  /// The kernels whose tiles a tuner may choose. A fused backward is not among them: it always has
  /// its default tile, or the given one.
  const std::vector<KernelKind>& tunable_kernels() const;
  /// The contests of the tunable kernels among these. If tiles are named, only they compete with
  /// the default tiles.
  std::vector<TileContest> contests(const std::vector<KernelKind>&,
                                    const std::vector<TileConfig>& named) const;

private:
  /// The given tile, or else the default tile for the spec.
  TileConfig tile_of(KernelKind, const AttentionSpec&) const;
  void check_dp_sums() const;

  ResolvedSpec spec_;
  Arch arch_;
  Tiles given_;
  std::optional<TileConfig> fused_tile_;
  ResolvedSpec built_;
};

} // namespace sagebwd
