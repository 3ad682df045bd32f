//===- key_mean.cpp - Sums of the keys, for their mean ---------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

/// The mean serves the INT8 copies of K: for S, and transposed for dQ.
bool needed(Pass pass, const AttentionSpec& s) {
  return s.smooth_k && (which_int8(s.precision).s || pass == Pass::backward);
}

/// The same in both passes and under every option.
void narrow(AttentionSpec& s) { s = without_numerics(s); }

void configure(Configuration& c, const KernelSpec&) {
  c.add("MEAN_CHUNK", static_cast<int>(kMeanChunk));
  c.add("MOST_MEAN_CHUNKS", static_cast<int>(kMostMeanChunks));
}

} // namespace

std::vector<KernelDefinition> key_mean_kernels() {
  return {{
      .kind = KernelKind::key_mean,
      .differs_by_pass = false,
      .needed = needed,
      .narrow = narrow,
      .fields = fields_named({O::k, O::k_partial}),
      .root_template = "kernels/key_mean.cuh",
      .configure = configure,
      .threads = [](const KernelSpec&) { return 256; },
      .grid = [](const KernelSpec&, const Problem& p) -> Grid {
        return {blocks_of(mean_chunks(p.seq_kv)), blocks_of(p.heads_kv), blocks_of(p.batch)};
      },
  }};
}

} // namespace sagebwd
