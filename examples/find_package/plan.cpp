//===- plan.cpp - What an installed library says without a GPU ---------------===//
//
// An operation's kernels and their source, the memory it needs, its error against FP64; and, where
// there is no GPU, why it cannot run.
//
//===----------------------------------------------------------------------===//
#include "sagebwd/generator/plan.h"
#include "sagebwd/generator/emit.h"
#include "sagebwd/generator/operation.h"
#include "sagebwd/runtime/attention.h"
#include "sagebwd/runtime/reference/reference.h"
#include "sagebwd/runtime/version.h"

#include <cstdio>

using namespace sagebwd;

int main() {
  AttentionSpec spec;
  spec.head_dim = 64;
  spec.causal = Causal::top_left;
  const ResolvedSpec resolved_spec = resolved(spec);
  std::printf("sagebwd %s\n%s\n", version(), to_string(*resolved_spec).c_str());

  for (const KernelSpec& kernel :
       Operation(resolved_spec, find_arch("sm_90a")).distinct_kernels()) {
    const KernelSource source = emit(kernel);
    std::printf("kernel %s: %zu characters\n", source.name.c_str(), source.text.size());
  }

  const Problem problem{/*batch=*/1, /*heads=*/2, /*heads_kv=*/1, /*seq_q=*/128, /*seq_kv=*/128};
  std::printf("workspace: %zu bytes forward, %zu backward\n",
              workspace_bytes(Pass::forward, resolved_spec, problem),
              workspace_bytes(Pass::backward, resolved_spec, problem));

  const auto inputs = reference::random_inputs(problem, spec.head_dim, spec.dtype, /*sigma=*/1,
                                               /*seed=*/0);
  for (const auto& [tensor, figures] :
       reference::trace(inputs, *resolved_spec, reference::plan_of(spec.precision)))
    std::printf("%-5s relative L2 error %.4f\n", tensor.c_str(), figures.rel_l2);

  try {
    const Attention attention(spec);
    std::printf("runs on %s\n", std::string(attention.arch().name).c_str());
  } catch (const LibraryError& error) {
    std::printf("does not run here: %s\n", error.what());
  }
}
