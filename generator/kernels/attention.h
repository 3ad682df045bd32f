//===- attention.h - What the attention kernels' definitions share ----------===//
//
// Each block owns queries (with dK and dV: keys), 16 to a warp, and walks over keys (queries). The
// same templates serve mma.sync and wgmma.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/definition.h"

#include <algorithm>

namespace sagebwd::attention {

using O = Operand;

inline bool scores16(const AttentionSpec& s) { return !which_int8(s.precision).s; }
inline bool blockwise(const AttentionSpec& s) { return grouping_of(s.granularity).one_scale; }
inline bool wide(const AttentionSpec& s) { return width(s) > 64; }

/// Bytes of a token of Q or K for S, and of a token of V or dO.
inline int score_row(const AttentionSpec& s) { return scores16(s) ? 2 * width(s) : width(s); }
inline int value_row(const AttentionSpec& s) { return 2 * width(s); }
/// Channels of a gradient that a block sums.
inline int gradient_channels(const AttentionSpec& s) {
  return sum_channels(KernelKind::backward_dq, s);
}

/// Shared memory of a ring's units of keys: scales of what sums are in and of the units whose first
/// `step` keys have a stage, and for each warp ratios of one to the next.
inline int unit_bytes_ws(const AttentionSpec& s, const TileConfig& t, int step) {
  const int slots = 1 + static_cast<int>(ceil_div(t.stages, channel_tokens_kv(s) / step));
  return (slots * static_cast<int>(kChannelVectors) + t.warps) * width(s) * 4;
}

/// Shared memory for what scores of ws' forward start from (tile/magic_product.cuh).
constexpr int kMagicProductBytes = 4096;

/// Why a pair of warpgroups is not built for a spec and tile; empty where it is.
std::string objection_to_pair(const AttentionSpec&, const TileConfig&);

/// Why a kernel whose blocks sum gradients of all channels has none for such heads.
inline std::string too_wide(const AttentionSpec& s) {
  return "its blocks sum gradients of all channels, " + std::to_string(kWidestFused) +
         " at most; of " + std::to_string(s.head_dim) +
         " families mma, wgmma and, of most specs, pair share them out";
}

/// An 8-bit A operand takes a quarter of its columns' registers. wgmma keeps the products of a
/// whole group apart until they are scaled, of 128 channels at most; mma.sync forms 16 columns at a
/// time.
inline int product_registers(const AttentionSpec& s, Family family) {
  return family == Family::wgmma ? std::min(width(s), kWidestFused) / 2 : 8;
}

/// The spec less what no attention kernel depends on.
void narrow(AttentionSpec&);
bool in_backward(Pass, const AttentionSpec&);
Grid grid(const KernelSpec&, const Problem&);
int threads(const KernelSpec&);
/// Beside the warps that multiply, a warpgroup of which one thread copies.
int threads_ws(const KernelSpec&);

/// What all of them are specialised by: the spec, and the tile.
void configure_spec(Configuration&, const AttentionSpec&);
void configure_common(Configuration&, const KernelSpec&);
/// Registers that the warps of a warp-specialised block share out.
void configure_registers(Configuration&, const KernelSpec&);
void configure_operands(Configuration&, const KernelSpec&, bool score_rows_in_registers,
                        int value_unroll);

KernelDefinition forward(Family);
KernelDefinition forward_ws();
KernelDefinition backward_dq(Family);
KernelDefinition backward_dq_ws();
KernelDefinition backward_dq_pair();
KernelDefinition backward_dkv(Family);
KernelDefinition backward_dkv_ws();
KernelDefinition backward_dkv_pair();
KernelDefinition backward(Family);
KernelDefinition backward_ws();
KernelDefinition round_dq();

} // namespace sagebwd::attention
