//===- kernel.h - One kernel of an attention operation ---------------------===//
#pragma once

#include "generator/arch.h"
#include "generator/spec.h"
#include "generator/tile.h"

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sagebwd {

enum class Pass { forward, backward };
template <> struct Words<Pass> {
  static constexpr std::string_view what = "pass";
  static constexpr Word<Pass> all[] = {{Pass::forward, "forward"}, {Pass::backward, "backward"}};
};

/// The kinds of kernels, which generator/definition.h describes. A pass launches
/// its kernels in the order of this list (launch_order()), except that backward_dkv comes before
/// backward_dq if the granularity is not `block`.
enum class KernelKind {
  key_mean,        ///< sums of K over chunks of keys, for the mean of the keys
  quantize,        ///< INT8 copies of Q, K, V and dO, and the vectors of each query
  mean_scores,     ///< scores of the means that smoothing subtracts from Q
  pack_mask,       ///< lists of blocks, as bits, from a mask; no pass launches it
  pack_indices,    ///< the same from numbers of blocks
  interval_bits,   ///< the same from intervals of queries that do not see a key
  mask_bits,       ///< the same from a mask's expression
  pool_blocks,     ///< sums of blocks of Q and K, for scores of pairs; no pass launches it
  top_blocks,      ///< lists of the blocks with the best scores; no pass launches it
  route_blocks,    ///< the same from sums of blocks, whose products are the scores
  transpose_bits,  ///< for each block of keys the blocks of queries that list it
  order_lists,     ///< in which order blocks of keys are begun: those of long lists first
  forward,         ///< O and lse
  backward_dq,     ///< dQ
  backward_dkv,    ///< dK and dV
  backward,        ///< dK, dV and, summed in memory, dQ
  round_dq,        ///< dQ from its sums in memory
  linear_states,   ///< what blocks of keys add to linear attention
  linear_sums,     ///< for each block of queries the sums of that over the unlisted ones
  linear_out,      ///< its output, mixed with the exact one
  linear_dout,     ///< the gradients of its queries and sums
  linear_dsums,    ///< for each block of keys the sums of those over queries that do not list it
  linear_dkv,      ///< those of its keys, less their mean, and values
  linear_mean,     ///< the mean of the former
  linear_dk,       ///< the mean's part of it
  estimated_rest,  ///< what unlisted blocks of keys would weigh; calls launch these three alone
  estimated_dq,    ///< its gradient of the queries
  estimated_dk,    ///< and of the means of blocks of keys, in parts
  front,           ///< norm and RoPE of Q and K; no pass launches these five
  front_gradients, ///< their gradients
  front_gains,     ///< the sums of those of gains
  gate,            ///< gated outputs
  gate_gradients,  ///< gradients of outputs and of gates
};
template <> struct Words<KernelKind> {
  static constexpr std::string_view what = "kernel";
  static constexpr Word<KernelKind> all[] = {{KernelKind::key_mean, "key_mean"},
                                             {KernelKind::quantize, "quantize"},
                                             {KernelKind::mean_scores, "mean_scores"},
                                             {KernelKind::pack_mask, "pack_mask"},
                                             {KernelKind::pack_indices, "pack_indices"},
                                             {KernelKind::interval_bits, "interval_bits"},
                                             {KernelKind::mask_bits, "mask_bits"},
                                             {KernelKind::pool_blocks, "pool_blocks"},
                                             {KernelKind::top_blocks, "top_blocks"},
                                             {KernelKind::route_blocks, "route_blocks"},
                                             {KernelKind::transpose_bits, "transpose_bits"},
                                             {KernelKind::order_lists, "order_lists"},
                                             {KernelKind::forward, "forward"},
                                             {KernelKind::backward_dq, "backward_dq"},
                                             {KernelKind::backward_dkv, "backward_dkv"},
                                             {KernelKind::backward, "backward"},
                                             {KernelKind::round_dq, "round_dq"},
                                             {KernelKind::linear_states, "linear_states"},
                                             {KernelKind::linear_sums, "linear_sums"},
                                             {KernelKind::linear_out, "linear_out"},
                                             {KernelKind::linear_dout, "linear_dout"},
                                             {KernelKind::linear_dsums, "linear_dsums"},
                                             {KernelKind::linear_dkv, "linear_dkv"},
                                             {KernelKind::linear_mean, "linear_mean"},
                                             {KernelKind::linear_dk, "linear_dk"},
                                             {KernelKind::estimated_rest, "estimated_rest"},
                                             {KernelKind::estimated_dq, "estimated_dq"},
                                             {KernelKind::estimated_dk, "estimated_dk"},
                                             {KernelKind::front, "front"},
                                             {KernelKind::front_gradients, "front_gradients"},
                                             {KernelKind::front_gains, "front_gains"},
                                             {KernelKind::gate, "gate"},
                                             {KernelKind::gate_gradients, "gate_gradients"}};
};

/// Which of the channels that a kernel computes with exist in the caller's tensors. `part`: as many
/// as each call says; the kernel takes the others for zeros.
enum class Channels { all, part };
template <> struct Words<Channels> {
  static constexpr std::string_view what = "channels";
  static constexpr Word<Channels> all[] = {{Channels::all, "all"}, {Channels::part, "part"}};
};

/// Everything that decides one kernel's source and machine code.
struct KernelSpec {
  KernelKind kind;
  Pass pass;
  /// A resolved spec, in which each field that the kernel does not depend on has its default. The
  /// head dimension is one of kWidths.
  AttentionSpec attention;
  Arch arch;
  TileConfig tile; ///< TileConfig() for kernels without tiles
  Channels channels = Channels::all;

  bool operator==(const KernelSpec&) const = default;
};
/// Calls the visitor with the fields that decide what the kernel computes.
template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, KernelSpec>
void visit_numerics(Self& k, Visitor&& visit) {
  visit_fields(k.attention, visit);
  visit(Label{"channels", " channels=", "which of its channels tensors have", /*quiet=*/true},
        k.channels);
}
/// Calls the visitor with the same fields, and with the fields of the tile.
template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, KernelSpec>
void visit_fields(Self& k, Visitor&& visit) {
  visit_numerics(k, visit);
  visit_fields(k.tile, visit);
}

/// A C identifier, e.g. "sagebwd_forward_d128_causal_top_left_wgmma_64x128_w4_s2_b3". Two kernels
/// with the same name and architecture are the same kernel. The name has the head dimension, every
/// field of the spec that differs from its default, and the tile.
std::string kernel_name(const KernelSpec&);

/// The fields of a kernel's spec as text, for cache keys. The architecture is not among them.
/// Kernels with equal fields have equal sources.
std::vector<std::pair<std::string, std::string>> labelled(const KernelSpec&);
/// The inverse: `text_of` gives the text of each field by its name, empty for a field that the key
/// does not have. Raises SpecError if this version has no such kernel.
KernelSpec read_labelled(const std::function<std::string(const std::string&)>& text_of,
                         const Arch&);

/// A tile for each of some kernels.
using Tiles = std::map<KernelKind, TileConfig>;

/// One kernel of a resolved spec. Each field that the kernel does not depend on gets its default.
KernelSpec kernel_of(KernelKind, Pass, const AttentionSpec&, const Arch&, const TileConfig&);
/// This one makes a kernel with tiles, whose definition says the pass.
KernelSpec tiled_kernel(KernelKind, const ResolvedSpec&, const Arch&, const TileConfig&);

} // namespace sagebwd
