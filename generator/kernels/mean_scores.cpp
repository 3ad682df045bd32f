//===- mean_scores.cpp - Scores of the queries' means -----------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

/// The kernel is the same under every mask and precision.
void narrow_mean_scores(AttentionSpec& s) {
  const AttentionSpec given = s;
  s = without_numerics(s);
  s.granularity = given.granularity, s.group_q = given.group_q, s.group_kv = given.group_kv;
  s.sink_keys = given.sink_keys, s.smooth_k = given.smooth_k, s.smooth_q = true;
}

void configure_mean_scores(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  c.add("SMOOTH_K", s.smooth_k);
  c.add("SINK_KEYS", s.sink_keys);
  c.add("QUERY_TOKENS", channel_tokens_q(s));
}

} // namespace

std::vector<KernelDefinition> mean_scores_kernels() {
  return {{
      .kind = KernelKind::mean_scores,
      .passes = {Pass::forward, Pass::backward},
      .needed = [](Pass, const AttentionSpec& s) { return s.smooth_q; },
      .narrow = narrow_mean_scores,
      .fields = fields_named({O::k, O::k_mean, O::q_mean, O::mean_scores}),
      .root_template = "kernels/mean_scores.cuh",
      .configure = configure_mean_scores,
      .threads = [](const KernelSpec&) { return static_cast<int>(kPadding); },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        return {padded(p.seq_kv) / kPadding, p.heads, sequences_apart(k.attention, p)};
      },
  }};
}

} // namespace sagebwd
