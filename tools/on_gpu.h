//===- on_gpu.h - The kernels, on host data --------------------------------===//
#pragma once

#include "runtime/attention.h"
#include "runtime/reference/reference.h"

namespace sagebwd::tools {

/// How the tensors lie in device memory.
enum class Layout { bhsd, bshd };

/// Raises LibraryError with a remedy where there is no such GPU.
void require_gpu(int device, const char* command);

/// Copies the inputs to the operation's device, runs forward and backward, copies o, lse, dq, dk
/// and dv back. `padding` adds unused elements (a multiple of 8) to every token's stride, and the
/// outputs' memory starts as NaN, so an element that is not written is seen.
reference::Outputs<float> run_on_gpu(Attention&, int device, const reference::Inputs&,
                                     Layout = Layout::bhsd, int64_t padding = 0);

} // namespace sagebwd::tools
