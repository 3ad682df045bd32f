//===- attention.h - What the attention kernels' definitions share ----------===//
//
// A block of forward or backward_dq owns queries, 16 per warp, and walks over keys. A block of
// backward_dkv or backward owns keys and walks over queries. One template of a kernel serves the
// families mma and wgmma; the families ws and pair have templates of their own.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/definition.h"
#include "templates/layouts/block_shape.cuh"

#include <algorithm>

namespace sagebwd::attention {

using O = Operand;

/// The number of channels of a gradient that a block sums.
inline int gradient_channels(const AttentionSpec& s) {
  return sum_channels(KernelKind::backward_dq, s);
}

/// A kernel's layout in shared memory depends on this shape. bytes_of() gives the bytes of a layout
/// that depends on nothing else.
BlockShape shape_of(const AttentionSpec&, const TileConfig&);
template <typename Layout> int bytes_of(const AttentionSpec& s, const TileConfig& t) {
  return Layout(shape_of(s, t)).total;
}

/// Why the family pair is not built for a spec and tile; empty if it is.
std::string objection_to_pair(const AttentionSpec&, const TileConfig&);
/// Why parts of a tile cannot take turns in shared memory, which is what 0 stages mean.
std::string objection_to_turns(const AttentionSpec&, const TileConfig&);

/// The objection of a kernel whose blocks sum the gradients of all channels, for heads that are
/// wider than kWidestFused.
inline std::string too_wide(const AttentionSpec& s) {
  return "its blocks sum gradients of all channels, " + std::to_string(kWidestFused) +
         " at most; of " + std::to_string(s.head_dim) +
         " families mma, wgmma and, of most specs, pair share them out";
}

/// The registers of a thread for products that are not scaled yet. wgmma forms the products of a
/// whole group, for 128 channels at most, before they are scaled; mma.sync forms 16 columns at a
/// time. Callers add the registers of the 8-bit A operand, which are a quarter of those of the same
/// columns as accumulators.
inline int product_registers(const AttentionSpec& s, Family family) {
  return family == Family::wgmma ? std::min(width(s), kWidestFused) / 2 : 8;
}

/// Sets the fields that no attention kernel depends on to their defaults.
void narrow(AttentionSpec&);
Grid grid(const KernelSpec&, const Problem&);
/// Those of the warps that multiply and, for a copier, of one more warpgroup.
int threads(const KernelSpec&);

/// Add the constants that all attention kernels have. The first function adds those of the spec,
/// the second one those of the spec and of the tile.
void configure_spec(Configuration&, const AttentionSpec&);
void configure_common(Configuration&, const KernelSpec&);
void configure_operands(Configuration&, const KernelSpec&, bool score_rows_in_registers,
                        int value_unroll);

KernelDefinition forward(Family);
KernelDefinition forward_ws();
KernelDefinition forward_team();
KernelDefinition forward_pair();
KernelDefinition backward_dq(Family);
KernelDefinition backward_dq_ws();
KernelDefinition backward_dq_pair();
KernelDefinition backward_dq_team();
KernelDefinition backward_dkv(Family);
KernelDefinition backward_dkv_ws();
KernelDefinition backward_dkv_pair();
KernelDefinition backward_dkv_team();
KernelDefinition backward(Family);
KernelDefinition backward_ws();
KernelDefinition round_dq();

} // namespace sagebwd::attention
