//===- specs.h - The specs the generator's tests run over ------------------===//
#pragma once

#include "generator/kernel.h"
#include "generator/operation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace sagebwd::test {

inline constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

/// Whether a spec without masks is built, of which very wide heads have few.
inline bool is_built(const AttentionSpec& s) {
  const bool formats =
      s.precision == Precision::six_of_seven || s.precision == Precision::gradients16;
  return s.head_dim <= 256 ||
         (formats && s.granularity == Granularity::row && (s.group_kv == 0 || s.group_kv == 64));
}

/// Every spec with default groups and sinks, and `row` with both sizes of key groups and without a
/// sink. Not resolved.
inline std::vector<AttentionSpec> all_specs() {
  std::vector<AttentionSpec> specs;
  for (int head_dim : kWidths)
    for (DType dtype : {DType::bf16, DType::fp16})
      for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
        for (const auto& [precision, word] : Words<Precision>::all)
          for (bool smooth_k : {false, true})
            for (bool rotate : {false, true}) {
              AttentionSpec s = {head_dim,  dtype,    causal, Granularity::row,
                                 precision, smooth_k, rotate};
              specs.push_back(s);
              s.group_kv = 64;
              specs.push_back(s);
              s.sink_keys = 0;
              specs.push_back(s);
              s.group_kv = 128;
              specs.push_back(s);
              s.granularity = Granularity::block, s.group_kv = 0, s.sink_keys = -1;
              if (head_dim <= 128 || precision != Precision::qk16) // else sm_90a alone builds it
                specs.push_back(s);
            }
  std::erase_if(specs, [](const AttentionSpec& s) { return !is_built(s); });
  return specs;
}

/// dQ summed in FP16, which few specs can have.
inline AttentionSpec with_fp16_sums() {
  AttentionSpec s;
  s.precision = Precision::gradients16, s.deterministic = false, s.dq_sums = DqSums::fp16;
  return s;
}

/// dP summed in FP16.
inline AttentionSpec with_half_dp(int head_dim = 128) {
  AttentionSpec s;
  s.head_dim = head_dim, s.dp_sums = DpSums::fp16;
  return s;
}

/// Whether a block has too little shared memory for the gradients of 256 channels, and for 16-bit
/// scores of them.
inline bool is_small(const Arch& arch) { return arch.max_shared_bytes < 128 * 1024; }
/// Whether there is a tile of a kernel.
inline bool fits(KernelKind kind, const AttentionSpec& s, const Arch& arch) {
  if (s.head_dim > 256)
    return is_built(s);
  if (kind == KernelKind::backward_dq && s.head_dim > 128 && s.precision == Precision::qk16 &&
      s.granularity == Granularity::block && arch.name != "sm_90a")
    return false; // for want of registers
  const bool large = kind != KernelKind::forward || s.precision == Precision::qk16;
  return s.head_dim <= 128 || !large || !is_small(arch);
}

/// Kernels, each once: many specs have some kernels in common, and to emit one takes a while.
class Distinct {
public:
  /// Whether it is new.
  bool insert(const KernelSpec& kernel) {
    // Whatever names say, kernels that differ are two.
    std::vector<KernelSpec>& alike = by_name_[kernel_name(kernel)];
    if (std::find(alike.begin(), alike.end(), kernel) != alike.end())
      return false;
    alike.push_back(kernel);
    return true;
  }

private:
  std::map<std::string, std::vector<KernelSpec>> by_name_;
};

inline std::vector<KernelKind> kinds_of(const std::vector<KernelSpec>& kernels) {
  std::vector<KernelKind> kinds;
  for (const KernelSpec& kernel : kernels)
    kinds.push_back(kernel.kind);
  return kinds;
}

/// The kernel of one kind among those of a pass, with its default tile.
inline KernelSpec kernel_of(KernelKind kind, Pass pass, const AttentionSpec& spec,
                            std::string_view arch) {
  for (const KernelSpec& kernel : Operation(resolved(spec), find_arch(arch)).kernels(pass))
    if (kernel.kind == kind)
      return kernel;
  throw std::logic_error("this pass has no such kernel");
}

/// The call raises SpecError, and its message has all of the parts.
inline void expect_refusal(const std::function<void()>& call,
                           std::initializer_list<const char*> parts) {
  try {
    call();
    ADD_FAILURE() << "it was not refused; expected was a message with '" << *parts.begin() << "'";
  } catch (const SpecError& error) {
    for (const char* part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in: " << error.what();
  }
}

} // namespace sagebwd::test
