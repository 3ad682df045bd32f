//===- quantize.cpp - INT8 copies of Q, K, V and dO ------------------------===//
//
// A pass launches this kernel once. Some of its blocks quantise queries and dO, others keys, others
// values. The precision decides which copies there are.
//
//===----------------------------------------------------------------------===//

#include "generator/definition.h"
#include "generator/pointwise.h"

namespace sagebwd {
namespace {

using O = Operand;

void narrow_quantize(AttentionSpec& s) {
  const AttentionSpec plain, given = s;
  drop_mask(s);
  if (is_mixed(given)) { // how large a part of dO is linear attention's depends on lists
    s.sparse_q = given.sparse_q, s.sparse_kv = given.sparse_kv;
    s.linear = LinearKeys::complement; // which of the two is an argument
  }
  // Zeros are written here to which a fused backward adds dQ, and counters that order it.
  if (!is_fused(s))
    s.gradient_kernels = plain.gradient_kernels;
  if (!is_fused(s) || orders_dq(s))
    s.deterministic = plain.deterministic;
  s.group_kv = default_group_keys(s); // if sizes vary, no scale depends on them
  if (has_score(s))                   // only those that need s as it is differ
    s.score = bends_scores(s) && s.smooth_k && which_int8(s.precision).s ? "tanh(s)" : "";
  if (!which_int8(s.precision).s) // only Q and K for INT8 scores are rotated
    s.rotate = plain.rotate;
}

/// The tokens of one block, which share the scales of channels.
int query_tokens(const KernelSpec& k) { return channel_tokens_q(k.attention); }
int key_tokens(const KernelSpec& k) { return channel_tokens_kv(k.attention); }

/// Whether the kernel copies rows of packed sequences into tiles, which bulk copies then read.
bool copies_rows(const KernelSpec& k) {
  return k.pass == Pass::backward && k.attention.packed && k.arch.has_wgmma() &&
         !sums_dp_in_fp16(k.attention);
}
/// Whether the kernel copies V, so that blocks for values are needed.
bool copies_values(const KernelSpec& k) {
  return copies_rows(k) || (k.pass == Pass::backward && sums_dp_in_fp16(k.attention));
}
/// The number of tensors of keys that have copies: K and V, or one of the two.
int key_roles(const KernelSpec& k) {
  return k.pass == Pass::backward ? 1 + copies_values(k) : 1 + which_int8(k.attention.precision).s;
}

/// The most blocks per SM that leave each thread enough registers. With one block more, some
/// kernels would spill a few bytes; on Blackwell this holds for every precision.
int blocks_per_sm(const KernelSpec& k) {
  const Int8Products int8 = which_int8(k.attention.precision);
  const bool wide = width(k.attention) > 64, backward = k.pass == Pass::backward;
  const bool unrotated = int8.s && !k.attention.rotate, half_dp = sums_dp_in_fp16(k.attention);
  const bool tight = backward && (k.arch.is_blackwell() || (int8.s && int8.dk && !int8.dv) ||
                                  (!wide && (unrotated || !int8.s || k.attention.packed ||
                                             (half_dp && k.attention.smooth_q))));
  return width(k.attention) > kWidestFused ? 1 : (wide ? 2 : 3) - tight;
}

void configure_quantize(Configuration& c, const KernelSpec& k) {
  const AttentionSpec& s = k.attention;
  const Int8Products int8 = which_int8(s.precision);
  const bool backward = k.pass == Pass::backward;
  c.add("BACKWARD", backward);
  c.add("BLOCK_SCALES", grouping_of(s.granularity).one_scale);
  c.add("ROTATE", s.rotate && int8.s);
  c.add("SMOOTH_K", s.smooth_k);
  c.add("SHIFTED", s.smooth_k && int8.s); // the scores are those of smoothed keys
  c.add("SMOOTH_Q", s.smooth_q);
  c.add("BENDS_SCORES", bends_scores(s));
  c.add("SINK_KEYS", s.sink_keys);
  c.add("SCALED_DOUT", scales_dout(s));
  c.add("INT8_S", int8.s);
  c.add("QT8", backward && int8.dk);
  c.add("DOT8", backward && int8.dv);
  c.add("KT8", backward && int8.dq);
  c.add("K_ROWS", backward && !int8.dq);
  c.add("VT8", !backward);
  c.add("DQ_SUM", backward && is_fused(s));
  c.add("DQ_TURNS", backward && is_fused(s) && orders_dq(s));
  c.add("DQ_SUM16", backward && sums_dq_in_fp16(s));
  c.add("V_ROWS", copies_values(k));
  c.add("DOUT_ROWS", copies_rows(k));
  c.add("QUERY_ROWS", copies_rows(k) && !int8.dk);
  c.add("QUERY_TOKENS", query_tokens(k));
  c.add("KEY_TOKENS", key_tokens(k));
  c.add("MEAN_CHUNK", static_cast<int>(kMeanChunk));
  c.add("MOST_MEAN_CHUNKS", static_cast<int>(kMostMeanChunks));
  c.add("BLOCKS_PER_SM", blocks_per_sm(k));
  visit_lists(s, [&](auto... constant) { c.add(constant...); });
}

} // namespace

std::vector<KernelDefinition> quantize_kernels() {
  const ParamFields fields = fields_named(
      {// the caller's tensors, and the mean of the keys
       O::q, O::k, O::v, O::out, O::dout, O::lse, O::dlse, O::k_partial, O::k_mean,
       // copies: a pass writes those that its kernels read
       O::q8, O::q_rows, O::k8, O::k8_scale, O::vt8, O::vt8_scale, O::kt8, O::qt8, O::kt8_scale,
       O::qt8_scale, O::dot8, O::dot8_scale, O::dout_rows, O::k_rows, O::sink_partial, O::v_rows,
       O::query_rows,
       // sums of dQ and their factors, and means
       O::dq_sum, O::dq_turns, O::key_range, O::dq_factor, O::given_k_mean, O::q_mean});
  const auto half_of = [](const ParamFields& fields) {
    return fields_and(fields, {O::value_range, O::half_v, O::half_dout, O::dp_factor});
  };
  const ParamFields sharing =
      fields_and(fields, {O::alpha, O::alpha_stride_b, O::alpha_stride_h, O::alpha_stride_s,
                          O::alpha_tokens, O::alpha_of_rest, O::row_bits, O::row_stride_b,
                          O::row_stride_h, O::sparse_dout, O::one_sum});
  return {{
      .kind = KernelKind::quantize,
      .differs_by_pass = true,
      .shares_dout = true,
      .passes = {Pass::forward, Pass::backward},
      .narrow = narrow_quantize,
      .fields = fields,
      .half_fields = half_of(fields),
      .listed_fields = {sharing, half_of(sharing)},
      .smooth_v_fields = fields_and(fields, {O::value_sums}),
      .root_template = "kernels/quantize.cuh",
      .configure = configure_quantize,
      .threads = [](const KernelSpec& k) { return std::max(256, width(k.attention)); },
      .grid = [](const KernelSpec& k, const Problem& p) -> Grid {
        // The units of a key/value head are divided among the query heads that share it.
        const AttentionSpec& s = k.attention;
        const int64_t of_keys = units(Tokens::keys, key_tokens(k), s, p);
        return {units(Tokens::queries, query_tokens(k), s, p) +
                    key_roles(k) * ceil_div(of_keys, p.heads / p.heads_kv),
                p.heads, sequences_apart(s, p)};
      },
  }};
}

} // namespace sagebwd
