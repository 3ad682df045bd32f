//===- fastest.h - The fastest precision on a GPU ---------------------------===//
#pragma once

#include "generator/arch.h"
#include "generator/spec.h"

#include <string_view>

namespace sagebwd {

/// The front ends' precision="fastest" stands for these words on a GPU.
struct FastestPrecision {
  Precision precision = Precision::six_of_seven;
  DpSums dp_sums = DpSums::fp32;
  /// This says so, such as "measured on H100 and H200"; empty if nothing is known of the GPU.
  std::string_view evidence;
};

/// The fastest precision of an architecture's GPU, by the driver's name of it, such as "NVIDIA
/// GeForce RTX 4090". Errors are at most 1 % larger than those of 'six-of-seven', except where one
/// token is much larger than the others and FP16 sums of dP have fewer digits (docs/algorithm.md).
/// A GPU of which nothing is known has the default.
const FastestPrecision& fastest_precision(const Arch&, std::string_view gpu);

/// This asks for a spec, whose own precision does not matter. Under `keeps_dp_sums` its dp_sums are
/// kept. Where the GPU has no kernels for what is the fastest, or nobody knows whether it is, FP32
/// sums of dP are next, and then the default precision.
FastestPrecision fastest_precision(const AttentionSpec&, const Arch&, std::string_view gpu,
                                   bool keeps_dp_sums);

} // namespace sagebwd
