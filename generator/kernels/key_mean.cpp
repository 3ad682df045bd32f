//===- key_mean.cpp - Sums of the keys, for their mean ---------------------===//

#include "generator/definition.h"

namespace sagebwd {
namespace {

using O = Operand;

/// The mean is subtracted in the copies of K, for S and, transposed, for dQ. FP16 sums of dQ need
/// the ranges of keys and values, which this kernel finds, and FP16 sums of dP those of values and
/// their mean.
bool needs_key_mean(Pass pass, const AttentionSpec& s) {
  const bool backward = pass == Pass::backward;
  return (s.smooth_k && (which_int8(s.precision).s || backward || is_mixed(s))) ||
         (s.smooth_v && !backward) || (backward && (sums_dq_in_fp16(s) || sums_dp_in_fp16(s)));
}

/// The kernel is the same in both passes and under every option, except that it also finds ranges
/// if dQ or dP is summed in FP16.
void narrow_key_mean(AttentionSpec& s) {
  const AttentionSpec given = s;
  s = without_numerics(s);
  s.dp_sums = given.dp_sums;
  s.smooth_v = given.smooth_v;
  if (sums_dq_in_fp16(given)) // with the other fields that FP16 sums need
    s.dq_sums = given.dq_sums, s.precision = given.precision, s.deterministic = false;
}

void configure_key_mean(Configuration& c, const KernelSpec& k) {
  c.add("KEY_RANGE", sums_dq_in_fp16(k.attention));
  c.add("MEAN_CHUNK", static_cast<int>(kMeanChunk));
  c.add("MOST_MEAN_CHUNKS", static_cast<int>(kMostMeanChunks));
}

} // namespace

std::vector<KernelDefinition> key_mean_kernels() {
  return {{
      .kind = KernelKind::key_mean,
      .passes = {Pass::forward, Pass::backward},
      .needed = needs_key_mean,
      .narrow = narrow_key_mean,
      .fields = fields_named({O::k, O::v, O::k_partial, O::key_range}),
      .half_fields = fields_named({O::k, O::v, O::k_partial, O::key_range, O::value_range}),
      .smooth_v_fields = {fields_named({O::k, O::v, O::k_partial, O::key_range, O::value_sums})},
      .root_template = "kernels/key_mean.cuh",
      .configure = configure_key_mean,
      .threads = [](const KernelSpec& k) { return std::max(256, width(k.attention)); },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        return {mean_chunks(k.attention, p), p.heads_kv, sequences_apart(k.attention, p)};
      },
      .idle =
          [](const KernelSpec& k, const OperandValues& values) {
            return get(values, O::given_k_mean) != 0 && !sums_dq_in_fp16(k.attention) &&
                   !sums_dp_in_fp16(k.attention) && !k.attention.smooth_v;
          },
  }};
}

} // namespace sagebwd
