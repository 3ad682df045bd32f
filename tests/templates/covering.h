//===- covering.h - Which kernels the compile tests compile -----------------===//
//
// A subset of (spec, architecture) pairs: on every architecture every value of every field meets
// every value of every other; not the full product, which takes half an hour.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/space.h"

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd::test {

inline constexpr const char* kArchs[] = {"sm_80",  "sm_86",  "sm_89",  "sm_90a", "sm_100",
                                         "sm_103", "sm_110", "sm_120", "sm_121"};

/// An architecture for which ptxas makes the machine code of another one: of 42 kernels for sm_121
/// all but those of key_mean are those for sm_120, of 31 for sm_89 all are those for sm_86. Only
/// key_mean and what most will use is compiled for it, everything where SAGEBWD_TEST_EVERYTHING
/// is set.
bool is_twin(std::string_view arch);

/// Granularity and sink together: a sink is of `row` alone.
enum Form { row_with_sink, row, block, kForms };
Form form_of(const AttentionSpec&);

struct Pair {
  AttentionSpec spec;
  const Arch* arch;
  bool usual = false; ///< what most will use
};
std::vector<Pair> covering_pairs();

/// Gives specs of an architecture, in which every two values of fields that the kernel quantize
/// depends on meet, but those that no spec has both of.
std::vector<AttentionSpec> covering_quantize(const Arch&);

/// The kernels of one architecture, each once, by architecture and name.
std::map<std::string, KernelSpec> covering_kernels(const Arch&);

/// Sums of dQ in FP16, on sm_90a: head dimension, dtype, mask and, as quantize and round_dq differ
/// by them, sinks, smoothing and granularity.
std::vector<AttentionSpec> covering_sums();

} // namespace sagebwd::test
