//===- kernel.h - One kernel of an attention operation ---------------------===//
#pragma once

#include "generator/spec.h"
#include "generator/tile.h"

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sagebwd {

enum class Pass { forward, backward };
template <> struct Words<Pass> {
  static constexpr std::string_view what = "pass";
  static constexpr std::pair<Pass, std::string_view> all[] = {{Pass::forward, "forward"},
                                                              {Pass::backward, "backward"}};
};

/// The kernels of one operation, in launch order within each pass. What each is, its definition
/// says (generator/definition.h).
enum class KernelKind {
  key_mean,     ///< sums of K over chunks of keys, of which its mean is made
  quantize,     ///< INT8 copies of Q, K, V and dO, and what is needed of each query
  mean_scores,  ///< scores of the means that smoothing takes off Q
  forward,      ///< O and lse
  backward_dq,  ///< dQ
  backward_dkv, ///< dK and dV
  backward,     ///< dK, dV and, summed in memory, dQ
  round_dq,     ///< dQ from its sums in memory
};
template <> struct Words<KernelKind> {
  static constexpr std::string_view what = "kernel";
  static constexpr std::pair<KernelKind, std::string_view> all[] = {
      {KernelKind::key_mean, "key_mean"},       {KernelKind::quantize, "quantize"},
      {KernelKind::mean_scores, "mean_scores"}, {KernelKind::forward, "forward"},
      {KernelKind::backward_dq, "backward_dq"}, {KernelKind::backward_dkv, "backward_dkv"},
      {KernelKind::backward, "backward"},       {KernelKind::round_dq, "round_dq"}};
};

/// Which of the channels that a kernel computes with the caller's tensors have: `part`, so many as
/// each call says.
enum class Channels { all, part };
template <> struct Words<Channels> {
  static constexpr std::string_view what = "channels";
  static constexpr std::pair<Channels, std::string_view> all[] = {{Channels::all, "all"},
                                                                  {Channels::part, "part"}};
};

/// Everything that decides one kernel's source and machine code.
struct KernelSpec {
  KernelKind kind;
  Pass pass;
  /// Resolved; what the kernel does not depend on is the default, and its head dimension a width.
  AttentionSpec attention;
  Arch arch;
  TileConfig tile; ///< default-made for kernels without tiles
  Channels channels = Channels::all;

  bool operator==(const KernelSpec&) const = default;
};
/// Calls the visitor with the fields of what it computes.
template <typename Visitor> void visit_numerics(const KernelSpec& k, Visitor&& visit) {
  visit_fields(k.attention, visit);
  visit(Label{"channels", " channels=", "which of its channels tensors have", /*quiet=*/true},
        k.channels);
}
/// And with the tile's.
template <typename Visitor> void visit_fields(const KernelSpec& k, Visitor&& visit) {
  visit_numerics(k, visit);
  visit_fields(k.tile, visit);
}

/// A C identifier; kernels of one name and architecture are the same, e.g.
/// "sagebwd_forward_d128_causal_top_left_64x128_wgmma_64x128_w4_s2_b3". Of the spec it names the
/// head dimension and what is not the default.
std::string kernel_name(const KernelSpec&);

/// The fields of a spec, one by one, as text, without the architecture: what a cache key shows of
/// it. Kernels of equal fields have equal sources.
std::vector<std::pair<std::string, std::string>> labelled(const KernelSpec&);

/// Kernels that have tiles to choose among, of a split backward: those of a pass, or all.
const std::vector<KernelKind>& tiled_kernels(Pass);
const std::vector<KernelKind>& tiled_kernels();
/// The one of that name; raises SpecError, which names them.
KernelKind parse_tiled_kernel(std::string_view name);

/// Tiles by kernel.
using Tiles = std::map<KernelKind, TileConfig>;

/// One kernel of a resolved spec: what it does not depend on becomes the default.
KernelSpec kernel_of(KernelKind, Pass, const AttentionSpec&, const Arch&, const TileConfig&);
/// The same of a kernel that has tiles, which belongs to one pass.
KernelSpec tiled_kernel(KernelKind, const ResolvedSpec&, const Arch&, const TileConfig&);

} // namespace sagebwd
