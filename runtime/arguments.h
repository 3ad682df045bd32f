//===- arguments.h - What a call's arguments must be ------------------------===//
//
// Each raises SpecError with what was given and what is supported.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"

namespace sagebwd {

inline constexpr uint64_t kWorkspaceAlignment = 256;
inline constexpr int64_t kElementBytes = 2; ///< of q, k, v and their gradients

/// Sets a tensor's strides. Those of dimensions of size 1 do not matter and are not looked at.
void put_strides(OperandValues&, const CallerTensor&, const Tensor&, const Problem&);
/// What a tensor takes in memory where nothing else lies among its elements; 0 for another.
size_t bytes_without_gaps(const CallerTensor&, const Tensor&, const Problem&, int64_t channels);
void check_address(const CallerTensor&, uint64_t address, Pass, const AttentionSpec&);
void check_scale(float softmax_scale, const AttentionSpec&);
void check_workspace_bytes(size_t given, size_t needed);

} // namespace sagebwd
