//===- resolved.cpp - Checking specs ---------------------------------------===//
//
// Errors name the options that are the cause, each of which would be a remedy by itself, on some
// GPU (tests/generator/advice_test.cpp).
//
//===----------------------------------------------------------------------===//

#include "generator/pointwise.h"
#include "generator/spec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

namespace sagebwd {
namespace {

/// What the spec has lists of blocks for, in messages.
std::string named_lists(const AttentionSpec& spec) {
  return has_intervals(spec) ? "intervals" : spec.mask.empty() ? "lists of blocks" : "a mask";
}

/// Raises SpecError about the spec's lists of blocks, or about what it has them for.
[[noreturn]] void refuse_lists(const AttentionSpec& spec, const auto&... why) {
  if (has_intervals(spec))
    throw SpecError("intervals = ", spec.intervals, " is not supported", why...);
  if (!spec.mask.empty())
    throw SpecError("mask = ", spec.mask, " is not supported", why...);
  throw SpecError("lists of blocks of ", spec.sparse_q, " queries and ", spec.sparse_kv,
                  " keys are not supported", why...);
}

/// Raises SpecError unless the spec, with its group of queries, can have lists of such blocks.
void check_sparse(const AttentionSpec& spec) {
  for (int size : {spec.sparse_q, spec.sparse_kv})
    if (!includes(kSparseBlocks, size))
      refuse_lists(spec, ": a block has ", joined(kSparseBlocks, " or "), " of each");
  if (spec.sparse_q % spec.group_q != 0)
    refuse_lists(spec, " under '", spec.granularity, "', whose groups have ", spec.group_q,
                 " queries: take 128 queries, or 'row'");
  if (spec.packed && hides_anywhere(spec))
    refuse_lists(spec, " with packed sequences: let ", named_lists(spec), " say where they end");
  if (spec.packed)
    refuse_lists(spec, " with packed sequences: make a call for each sequence");
  if (spec.smooth_q || bounded_before(spec) || spec.window_right != kNoWindow)
    refuse_lists(spec, " with ", spec.smooth_q ? "smooth_q" : "a window",
                 ": leave one of the two out");
}

/// Checks that the number of intervals' numbers fits the mask.
void check_intervals(const AttentionSpec& spec) {
  if (!has_intervals(spec))
    return;
  const bool causal = spec.causal != Causal::none;
  if (!includes(kIntervalColumns, spec.intervals) || spec.intervals == (causal ? 4 : 1))
    refuse_lists(spec,
                 causal ? " with a causal mask: a key has 1 or 2 numbers there"
                        : " without a causal mask: a key has 2 or 4 numbers there",
                 "; leave it out for none");
}

/// Gives the mask its canonical text, without spaces.
void resolve_mask(AttentionSpec& spec) {
  if (spec.mask.empty())
    return;
  spec.mask = to_string(parse_mask(spec.mask));
  std::erase(spec.mask, ' ');
  if (has_intervals(spec))
    refuse_lists(spec, " with a mask: let the mask say what they say, or leave one of the two out");
}

/// Gives the score function its canonical text, without spaces, and checks what it excludes.
void resolve_score(AttentionSpec& spec) {
  if (!has_score(spec))
    return;
  const Expression score = parse_score(spec.score);
  spec.score = to_string(score);
  std::erase(spec.score, ' ');
  const auto exclude = [&](bool is_so, const auto&... why) {
    if (is_so)
      throw SpecError("score = ", spec.score, " is not supported ", why...);
  };
  for (const Expression::Node& node : score.nodes())
    exclude(node.op == Expression::Op::literal && node.type == ValueType::real &&
                std::isinf(std::bit_cast<float>(node.value)),
            "with inf in it: a mask hides keys, pass mask = ...");
  const size_t tensors = tables_of(spec).size();
  exclude(tensors > kMostOperands, "with this mask: both read ", tensors, " tensors, and ",
          kMostOperands, " are the most");
  exclude(blockwise(spec), "under '", spec.granularity, "': take '", Granularity::row, "'");
  exclude(spec.smooth_q, "with smooth_q: leave one of the two out");
  exclude(sums_dp_in_fp16(spec), "with dp_sums = ", spec.dp_sums, ": leave one of the two out");
  exclude(is_mixed(spec), "with linear = ", spec.linear,
          ": linear attention has no scores; leave one of the two out");
}

/// Fills in the blocks of lists for what hides single scores.
void resolve_hiding(AttentionSpec& spec) {
  check_intervals(spec);
  resolve_mask(spec);
  if (!hides_anywhere(spec))
    return;
  if (is_mixed(spec))
    refuse_lists(spec, " with linear = ", spec.linear,
                 ", whose router lists whole blocks: leave one of the two out");
  for (int* size : {&spec.sparse_q, &spec.sparse_kv})
    if (*size == 0)
      *size = kMaskBlock;
}

void check_words(const AttentionSpec& spec) {
  visit_fields(spec, []<typename T>(const Label& label, const T& value) {
    if constexpr (Worded<T>)
      if (std::none_of(std::begin(Words<T>::all), std::end(Words<T>::all),
                       [&](const auto& known) { return known.first == value; }))
        throw SpecError(label.name, " = ", static_cast<int>(value),
                        " is not supported: its values are ", known_words<T>(", "));
  });
}

void check_head_dim(const AttentionSpec& spec) {
  const int d = spec.head_dim;
  if (d >= kLeastHeadDim && d <= kMostHeadDim && d % kHeadDimStep == 0)
    return;
  const auto fail = [&](const auto&... instead) {
    throw SpecError("head dimension ", d, " is not built: supported are multiples of ",
                    kHeadDimStep, " from ", kLeastHeadDim, " to ", kMostHeadDim, instead...);
  };
  if (d <= 0)
    fail();
  if (d > kMostHeadDim)
    fail(". The shared memory of a GPU does not hold tiles of more channels: use another attention "
         "for such heads");
  fail("; pad q, k and v with zero channels to ",
       std::max(kLeastHeadDim, (d / kHeadDimStep + 1) * kHeadDimStep),
       " (and keep softmax_scale at that of the unpadded dimension)");
}

/// Raises SpecError for what kernels of heads of more than kWidestWithAll channels lack.
void check_very_wide(const AttentionSpec& spec) {
  if (!very_wide(spec))
    return;
  const auto fail = [&](const auto&... what) {
    throw SpecError(
        what..., " not supported for head dimension ", spec.head_dim, ": above ", kWidestWithAll,
        " kernels have granularity '", Granularity::row, "', precision '", Precision::six_of_seven,
        "' or '", Precision::gradients16,
        "', groups of 64 keys, smooth_k or not, rotate or not, every causal mask and window, and "
        "packed sequences; leave it out, or take at most ",
        kWidestWithAll, " channels");
  };
  if (blockwise(spec))
    fail("granularity = ", spec.granularity, " is");
  if (spec.precision != Precision::six_of_seven && spec.precision != Precision::gradients16)
    fail("precision = ", spec.precision, " is");
  if (has_intervals(spec))
    fail("intervals = ", spec.intervals, " is");
  if (!spec.mask.empty())
    fail("mask = ", spec.mask, " is");
  if (is_mixed(spec))
    fail("linear = ", spec.linear, " is");
  if (is_sparse(spec) || spec.sparse_kv != 0)
    fail("lists of blocks of ", spec.sparse_q, " queries and ", spec.sparse_kv, " keys are");
  if (has_score(spec))
    fail("score = ", spec.score, " is");
  if (spec.group_kv != 0 && spec.group_kv != default_group_keys(spec))
    fail("group_kv = ", spec.group_kv, " is");
  if (sums_dp_in_fp16(spec))
    fail("dp_sums = ", spec.dp_sums, " is");
  for (const auto& [name, given] :
       {std::pair("smooth_q", spec.smooth_q), std::pair("smooth_v", spec.smooth_v),
        std::pair("max_logits", spec.max_logits)})
    if (given)
      fail(name, " is");
}

/// Fills in which groups share scales, and how many keys are computed separately.
void resolve_groups(AttentionSpec& spec) {
  const Grouping& grouping = grouping_of(spec.granularity);
  if (spec.group_q == 0)
    spec.group_q = grouping.queries;
  const bool sparse = spec.sparse_q != 0 || spec.sparse_kv != 0;
  if (sparse)
    check_sparse(spec);
  if (spec.group_kv == 0) // no group straddles two blocks of a list
    spec.group_kv =
        sparse ? std::min(grouping.keys.back(), spec.sparse_kv) : default_group_keys(spec);
  // With a window only few queries see the first key, so that it is not worth a computation of its
  // own. With lists those that do not list its block must not see it.
  // A score function is applied to scores of tiles alone.
  const bool few_see_it = bounded_before(spec) || sparse || has_score(spec);
  const int most_sink_keys = few_see_it ? 0 : grouping.most_sink_keys;
  if (spec.sink_keys == -1)
    spec.sink_keys = most_sink_keys;
  if (spec.group_q != grouping.queries)
    throw SpecError("group_q = ", spec.group_q, " is not supported under '", spec.granularity,
                    "': it is ", grouping.queries, " there; leave it out for that default");
  if (!includes(grouping.keys, spec.group_kv))
    throw SpecError("group_kv = ", spec.group_kv, " is not supported under '", spec.granularity,
                    "': it is ", joined(grouping.keys, " or "),
                    " there; leave it out for the default");
  if (spec.sink_keys >= 0 && spec.sink_keys <= most_sink_keys)
    return;
  const auto fail = [&](const auto&... where) {
    throw SpecError("sink_keys = ", spec.sink_keys, " is not supported ", where...,
                    most_sink_keys ? ": 1 computes the first key separately, 0 does not"
                                   : ": no key is computed separately there, pass 0",
                    "; leave it out for the default");
  };
  if (!few_see_it || grouping.most_sink_keys == 0)
    fail("under '", spec.granularity, "'");
  fail("with ", sparse ? named_lists(spec) : has_score(spec) ? "a score function" : "a window");
}

void resolve_window(AttentionSpec& spec) {
  for (const auto& [name, side] :
       {std::pair("window_left", spec.window_left), std::pair("window_right", spec.window_right)})
    if (side < kNoWindow)
      throw SpecError(name, " = ", side,
                      " is not supported: it is how many keys a query sees on that side of its "
                      "own, 0 or more; leave it out, or pass -1, for all of them");
  if (spec.causal != Causal::none) // a causal mask hides all keys on the right
    spec.window_right = kNoWindow;
}

void check_sums(const AttentionSpec& spec) {
  if (!sums_dq_in_fp16(spec))
    return;
  const auto fail = [&](const auto&... why) {
    throw SpecError("dq_sums = ", spec.dq_sums, " is not supported ", why...);
  };
  const bool is_wide = width(spec) > kWidestFused;
  const bool in_int8 = spec.precision != Precision::gradients16;
  if (spec.deterministic || is_wide || in_int8) {
    std::vector<std::string> causes;
    if (spec.deterministic)
      causes.push_back("under 'deterministic', which adds up dQ in one order");
    if (is_wide)
      causes.push_back(text_of("for head dimension ", spec.head_dim));
    if (in_int8)
      causes.push_back(text_of("under precision '", spec.precision, "'"));
    fail(joined(causes, " and "),
         ": it needs an H100 or H200 (sm_90a), a spec without 'deterministic' "
         "(deterministic=False in Python), with precision '",
         Precision::gradients16, "' and a head dimension of at most ", kWidestFused,
         "; leave dq_sums out for fp32");
  }
  if (sums_dp_in_fp16(spec))
    throw SpecError("dp_sums = ", spec.dp_sums, " is not supported with dq_sums = ", spec.dq_sums,
                    ", which only the family 'ws' of sm_90a has, while dp_sums has the family "
                    "'mma': leave one of the two out for fp32");
  constexpr auto kInRegisters =
      ", whose kernel of dQ keeps its sums in registers; leave one of the two out";
  if (is_sparse(spec))
    fail("with ", named_lists(spec), kInRegisters);
  if (spec.gradient_kernels == Backward::split)
    fail("with gradient_kernels = ", spec.gradient_kernels, kInRegisters);
}

/// Raises SpecError if the spec asks for one kernel of all gradients, and there is none. The error
/// names the options that are the cause.
void check_gradient_kernels(const AttentionSpec& spec) {
  if (!is_fused(spec))
    return;
  const auto fail = [&](const auto&... why) {
    throw SpecError("gradient_kernels = ", spec.gradient_kernels, " is not supported ", why...,
                    "; leave it out for the kernels that the GPU has");
  };
  const Int8Products int8 = which_int8(spec.precision);
  if (width(spec) > kWidestFused)
    fail("for head dimension ", spec.head_dim, ": the registers suffice for ", kWidestFused,
         " at most");
  if (is_sparse(spec))
    fail("with ", named_lists(spec), ": only the split kernels walk over them");
  if (has_score(spec))
    fail("with a score function: only the split kernels have it");
  if (int8.dq != int8.dv)
    fail("under precision '", spec.precision, "': one kernel forms dQ and dV both in INT8 ('",
         Precision::six_of_seven, "' or '", Precision::qk16, "'), or both in 16 bits ('",
         Precision::gradients16, "' without 'deterministic')");
  constexpr auto kScales = ", where the kernel of dQ finds the scales that dK needs";
  if (blockwise(spec) && int8.dq && spec.deterministic)
    fail("under '", spec.granularity, "'", kScales);
  if (blockwise(spec) && int8.dq)
    fail("under '", spec.granularity, "' and precision '", spec.precision, "'", kScales);
  constexpr auto kOrder = ": it adds dQ up in a fixed order only if dQ and dV are INT8";
  if (spec.deterministic && !int8.dq && (blockwise(spec) || spec.group_kv != 128))
    fail("under 'deterministic'", kOrder);
  if (spec.deterministic && !int8.dq)
    fail("under 'deterministic' and precision '", spec.precision, "'", kOrder);
}

void check_linear(const AttentionSpec& spec) {
  if (!is_mixed(spec))
    return;
  const auto fail = [&](const auto&... why) {
    throw SpecError("linear = ", spec.linear, " is not supported ", why...);
  };
  if (!is_sparse(spec))
    fail("without lists of blocks, which say what it sees: take a spec with sparse_q and "
         "sparse_kv, the sizes of blocks, or leave it out");
  if (!has_linear_width(spec))
    fail("with head_dim = ", spec.head_dim,
         ": its kernels have 64 or 128 channels; pad q, k and v with zero channels for "
         "attention without it, or take precision='exact' in Python");
  if (spec.max_logits)
    fail("with max_logits, which are those of exact attention: leave one of the two out");
  if (spec.causal != Causal::none)
    fail("with causal = ", spec.causal,
         ": it would need sums for each token of the blocks on the diagonal; leave one of the "
         "two out");
}

void check_combinations(const AttentionSpec& spec) {
  if (spec.smooth_q && spec.packed)
    throw SpecError("smooth_q is not supported for packed sequences: make a call for each "
                    "sequence, or leave it out");
  if (spec.smooth_q && scores16(spec))
    throw SpecError("smooth_q is not supported under precision '", spec.precision,
                    "', where queries are not quantised: take '", Precision::six_of_seven,
                    "', or leave it out");
  if (is_sparse(spec) && spec.group_kv > spec.sparse_kv)
    throw SpecError("group_kv = ", spec.group_kv, " is not supported with blocks of ",
                    spec.sparse_kv,
                    " keys: a quantisation group must lie in one block; leave it out");
  if (spec.packed && blockwise(spec))
    throw SpecError("packed sequences are not supported under '", spec.granularity,
                    "', which keeps maxima for each pair of a sequence's tiles: take '",
                    Granularity::row, "', or a call for each sequence");
  if (spec.numerics != kNumerics)
    throw SpecError("numerics = ", spec.numerics, " is not what this version computes, which is ",
                    kNumerics, ": build with the version that wrote the spec, or ask for that");
}

} // namespace

ResolvedSpec resolved(AttentionSpec spec) {
  check_words(spec);
  check_head_dim(spec);
  check_very_wide(spec);
  resolve_hiding(spec);
  resolve_score(spec);
  resolve_groups(spec);
  resolve_window(spec);
  check_sums(spec);
  check_gradient_kernels(spec);
  check_linear(spec);
  check_combinations(spec);
  return ResolvedSpec(spec);
}

ResolvedSpec ResolvedSpec::without_linear() const {
  ResolvedSpec changed = *this;
  changed.spec_.linear = LinearKeys::none;
  return changed;
}

ResolvedSpec ResolvedSpec::as_in_records() const {
  ResolvedSpec changed = without_linear();
  changed.spec_.max_logits = changed.spec_.smooth_v = false;
  return changed;
}

ResolvedSpec ResolvedSpec::with(Backward backward) const {
  ResolvedSpec changed = *this;
  changed.spec_.gradient_kernels = backward;
  changed.spec_.deterministic |= backward == Backward::split;
  check_sums(changed);
  check_gradient_kernels(changed);
  return changed;
}

MaskEdges mask_edges(const AttentionSpec& s, int64_t queries, int64_t keys) {
  // A window without a causal mask has its diagonal as in flash-attention: at the last query the
  // diagonal is the last key.
  const int64_t diagonal = s.causal == Causal::top_left ? 0 : keys - queries;
  const bool right = s.window_right != kNoWindow;
  return {s.window_left != kNoWindow ? std::max(diagonal - s.window_left, -queries) : -queries,
          s.causal != Causal::none ? diagonal
          : right                  ? std::min(diagonal + s.window_right, keys)
                                   : keys};
}

} // namespace sagebwd
