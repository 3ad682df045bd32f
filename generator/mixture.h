//===- mixture.h - How exact and linear attention share a call's tensors ----===//
//
// In a call with linear attention (AttentionSpec::linear) the kernels of exact attention are those
// of calls without it, and read and write other tensors in the places of the caller's.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"

namespace sagebwd {

/// The tensor that a kernel of a mixed call takes as `operand`, of which the same is returned if it
/// takes the caller's own; Operand::count: it takes none.
///
/// Forward: exact attention writes sparse_out, and linear_out mixes it into out. Backward: linear
/// attention's gradients are added to those of exact attention where these lie, and the caller
/// gives exact attention's output as `out`.
Operand taken_as(Operand, KernelKind, Pass, const AttentionSpec&);

/// Whether a buffer of the workspace lies in the caller's `kept_sums` in both passes, if the call
/// keeps sums (Shares::keeps_sums of runtime/attention.h).
bool is_kept(Operand buffer, const AttentionSpec&);
/// Whether the backward of such a call leaves a kernel out, since all that it writes is kept.
bool is_spared(KernelKind, const AttentionSpec&);

/// The operands as a kernel of a mixed call takes them.
OperandValues as_taken(KernelKind, Pass, const ResolvedSpec&, const Problem&, OperandValues);

} // namespace sagebwd
