//===- key_mean.cpp - The mean of K over its keys --------------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

/// The mean serves the INT8 copies of K: for S, and transposed for dQ.
bool needed(Pass pass, const AttentionSpec& s) {
  return s.smooth_k && (s.precision == Precision::six_of_seven || pass == Pass::backward);
}

/// The same in both passes and under every option.
void narrow(AttentionSpec& s) { s = without_numerics(s); }

void configure(Configuration& c, const KernelSpec&) {
  c.add("MEAN_CHUNK", static_cast<int>(kMeanChunk));
}

} // namespace

std::vector<KernelDefinition> key_mean_kernels() {
  return {
      {
          .kind = KernelKind::key_mean_partial,
          .differs_by_pass = false,
          .needed = needed,
          .narrow = narrow,
          .fields = fields_named({O::k, O::k_partial}),
          .root_template = "kernels/key_mean_partial.cuh",
          .configure = configure,
          .threads = [](const KernelSpec& k) { return k.attention.head_dim / 8 * 16; },
          .grid = [](const KernelSpec&, const Problem& p) -> Grid {
            return {blocks_of(p.seq_kv, kMeanChunk), blocks_of(p.heads_kv), blocks_of(p.batch)};
          },
      },
      {
          .kind = KernelKind::key_mean,
          .differs_by_pass = false,
          .needed = needed,
          .narrow = narrow,
          .fields = fields_named({O::k_partial, O::k_mean}),
          .root_template = "kernels/key_mean.cuh",
          .configure = configure,
          .threads = [](const KernelSpec& k) { return k.attention.head_dim; },
          .grid = [](const KernelSpec&, const Problem& p) -> Grid {
            return {1, blocks_of(p.heads_kv), blocks_of(p.batch)};
          },
      },
  };
}

} // namespace sagebwd
