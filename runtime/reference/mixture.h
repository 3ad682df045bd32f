//===- mixture.h - SLA2's attention on the CPU ------------------------------===//
//
// Exact attention to listed blocks mixed with linear attention (arXiv 2602.12675, Algorithms 2 and
// 3), for specs with AttentionSpec::linear.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/reference/reference.h"

namespace sagebwd::reference {

/// Both in FP64. The inputs have shares and dout.
Outputs<double> exact_mixture(const Inputs&, const AttentionSpec& resolved);

/// Exact attention is emulated. Linear attention, which has no integers, is in FP64 up to what is
/// in the type of the tensors: what kernels round on the way to bf16 is about one hundredth of it.
Outputs<float> emulated_mixture(const Inputs&, const AttentionSpec& resolved);

} // namespace sagebwd::reference
