//===- verify_front.h - Norm and RoPE of a case of 'verify' -----------------===//
#pragma once

#include "tools/verify_case.h"

namespace sagebwd::tools {

/// Runs norm and RoPE of the queries and keys of a case, and their gradients. The case's seed draws
/// norms, gains, 1/rms, angles, pairs and eps, whatever the case's other draws are. Tensors are
/// judged by FP64 and the rounding of their type. Wrong writes to memory are added to the faults.
std::vector<Verdict> check_front_on_gpu(int device, const VerifyCase&, Faults&);

} // namespace sagebwd::tools
