//===- real_operation.h - The kernels of a whole operation -----------------===//
#pragma once

#include "generator/kernel.h"

#include <map>

namespace sagebwd::test {

/// Of forward and backward, each once: some serve both.
inline std::vector<KernelSpec> real_operation(const AttentionSpec& wanted, const Arch& arch) {
  const AttentionSpec spec = resolved(wanted);
  std::map<std::string, KernelSpec> kernels;
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel : kernels_of(pass, resolved(spec), arch))
      kernels.emplace(kernel_name(kernel), kernel);
  std::vector<KernelSpec> list;
  for (const auto& [name, kernel] : kernels)
    list.push_back(kernel);
  return list;
}

} // namespace sagebwd::test
