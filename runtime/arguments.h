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
void check_address(const CallerTensor&, uint64_t address, Pass, const AttentionSpec&);
void check_scale(float softmax_scale, const AttentionSpec&);
void check_workspace_bytes(size_t given, size_t needed);

} // namespace sagebwd
