//===- operation.h - The kernels of one attention operation ----------------===//
#pragma once

#include "generator/kernel.h"

#include <optional>

namespace sagebwd {

/// Kernels without those whose name has come before: some serve both passes.
std::vector<KernelSpec> each_once(const std::vector<KernelSpec>&);

/// What an operation launches on an architecture, with the tiles that are given and the default
/// ones else. Whether its backward is one kernel is decided once, when this is made.
class Operation {
public:
  /// Raises SpecError where the tiles, or the architecture's default, have no kernel with the sums
  /// of dQ that the spec asks for. A tile of KernelKind::backward asks for a fused backward;
  /// without it, one of backward_dq or backward_dkv asks for a split one.
  Operation(const ResolvedSpec&, const Arch&, const Tiles& given = {});

  /// As it was asked for.
  const ResolvedSpec& spec() const { return spec_; }
  /// As its kernels have it: a split backward is deterministic, whoever asks.
  const ResolvedSpec& built() const { return built_; }
  const Arch& arch() const { return arch_; }
  /// Whether one kernel forms all gradients.
  bool fused() const { return fused_tile_.has_value(); }

  /// The kernels of a pass, in launch order. Raises SpecError where no tile of one fits.
  std::vector<KernelSpec> kernels(Pass) const;
  /// Those of the forward and, if wanted, of the backward, each once.
  std::vector<KernelSpec> distinct_kernels(bool backward = true) const;
  /// The kernels it launches that have tiles to choose among: not a fused backward's.
  const std::vector<KernelKind>& tunable_kernels() const;

private:
  TileConfig tile_of(KernelKind) const;

  ResolvedSpec spec_;
  Arch arch_;
  Tiles given_;
  std::optional<TileConfig> fused_tile_;
  ResolvedSpec built_;
};

} // namespace sagebwd
