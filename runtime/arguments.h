//===- arguments.h - Checks of a call's arguments -------------------------===//
//
// These functions check the arguments of a call. Each raises SpecError; the message says what was
// given and what is supported.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"
#include "runtime/overlap.h"

namespace sagebwd {

inline constexpr uint64_t kWorkspaceAlignment = 256;
inline constexpr int64_t kElementBytes = 2; ///< of q, k, v and their gradients

/// Sets a tensor's strides. Strides of dimensions of size 1 have no effect and are ignored.
void put_strides(OperandValues&, const CallerTensor&, const Tensor&, const Problem&,
                 int64_t channels);
/// The bytes of a tensor whose elements fill their memory without gaps; 0 if there are gaps.
size_t bytes_without_gaps(const CallerTensor&, const Tensor&, const Problem&, int64_t channels);
/// The name of a tensor's member of ForwardArgs and BackwardArgs.
std::string_view told_name(Operand);
void check_address(const CallerTensor&, uint64_t address, Pass, const AttentionSpec&);
/// Refuses a member of Packing, or lists, that the spec would silently ignore.
[[noreturn]] void refuse_given(std::string_view what);
/// Refuses strides of lists where the spec has none, and strides with which lists would overlap.
/// Strides of dimensions of size 1 have no effect, as those of tensors.
void check_list_strides(const Lists&, const ResolvedSpec&, const Problem&);
/// Refuses strides of intervals where the spec has none, and strides that cannot be.
void check_intervals(const Intervals&, const ResolvedSpec&, const Problem&);
MemoryArea area_of(const Intervals&, const ResolvedSpec&, const Problem&);
/// Refuses sizes of tables that cannot be, of so many at most.
void check_tables(const Tables&, const ResolvedSpec&, const Problem&, size_t most = kMostTables);
/// Sets how many rows and columns a table has.
void put_sizes_of(OperandValues&, Operand table, const Table&);
MemoryArea area_of(Operand, const Table&);
/// Refuses shares where the spec has no linear attention, and strides that cannot be.
void check_shares(const Shares&, const ResolvedSpec&, const Problem&);
/// Refuses memory for sums where none are kept, none where they are, and memory that is misplaced.
void check_kept_sums(uint64_t address, bool keeps_sums);
void check_scale(float softmax_scale, const AttentionSpec&);
void check_workspace_bytes(size_t given, size_t needed);

} // namespace sagebwd
