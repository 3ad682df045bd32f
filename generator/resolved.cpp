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

/// The numbers as text, with `between` before the last, e.g. "64, 128 and 256".
std::string listed(const auto& numbers, const char* between) {
  std::string text;
  for (const int& number : numbers)
    text += (text.empty()                                             ? ""
             : &number == std::data(numbers) + std::size(numbers) - 1 ? between
                                                                      : ", ") +
            std::to_string(number);
  return text;
}

/// A field and its value, the beginning of an error about them, and a value among its words.
std::string assigned(const std::string& field, const auto& value) {
  return field + " = " + value_text(value);
}
std::string unsupported(const std::string& field, const auto& value) {
  return assigned(field, value) + " is not supported";
}
std::string in_quotes(const auto& value) { return "'" + value_text(value) + "'"; }

std::string hiding_unsupported(const AttentionSpec& spec) {
  return has_intervals(spec) ? unsupported("intervals", spec.intervals)
                             : unsupported("mask", spec.mask);
}
/// What the spec has lists of blocks for, in messages.
std::string named_lists(const AttentionSpec& spec) {
  return has_intervals(spec) ? "intervals" : spec.mask.empty() ? "lists of blocks" : "a mask";
}

/// Raises SpecError unless the spec, with its group of queries, can have lists of such blocks.
void check_sparse(const AttentionSpec& spec) {
  const auto sizes = [&] {
    if (hides_anywhere(spec))
      return hiding_unsupported(spec);
    return "lists of blocks of " + std::to_string(spec.sparse_q) + " queries and " +
           std::to_string(spec.sparse_kv) + " keys are not supported";
  };
  for (int size : {spec.sparse_q, spec.sparse_kv})
    if (!includes(kSparseBlocks, size))
      throw SpecError(sizes() + ": a block has " + listed(kSparseBlocks, " or ") + " of each");
  if (spec.sparse_q % spec.group_q != 0)
    throw SpecError(sizes() + " under " + in_quotes(spec.granularity) + ", whose groups have " +
                    std::to_string(spec.group_q) + " queries: take 128 queries, or 'row'");
  if (spec.packed || spec.smooth_q || bounded_before(spec) || spec.window_right != kNoWindow)
    throw SpecError(sizes() + " with " +
                    (spec.packed ? std::string("packed sequences: ") +
                                       (hides_anywhere(spec)
                                            ? "let " + named_lists(spec) + " say where they end"
                                            : "make a call for each sequence")
                     : spec.smooth_q ? "smooth_q: leave one of the two out"
                                     : "a window: leave one of the two out"));
}

/// Checks that the number of intervals' numbers fits the mask.
void resolve_intervals(AttentionSpec& spec) {
  if (!has_intervals(spec))
    return;
  const bool causal = spec.causal != Causal::none;
  const std::string given = hiding_unsupported(spec);
  if (!includes(kIntervalColumns, spec.intervals) || spec.intervals == (causal ? 4 : 1))
    throw SpecError(given + " " +
                    (causal ? "with a causal mask: a key has 1 or 2 numbers there"
                            : "without a causal mask: a key has 2 or 4 numbers there") +
                    "; leave it out for none");
}

/// Gives the mask its canonical text, without spaces.
void resolve_mask(AttentionSpec& spec) {
  if (spec.mask.empty())
    return;
  spec.mask = to_string(parse_mask(spec.mask));
  std::erase(spec.mask, ' ');
  if (has_intervals(spec))
    throw SpecError(hiding_unsupported(spec) +
                    " with a mask: let the mask say what they say, or leave one of the two out");
}

/// Gives the score function its canonical text, without spaces, and checks what it excludes.
void resolve_score(AttentionSpec& spec) {
  if (!has_score(spec))
    return;
  const Expression score = parse_score(spec.score);
  spec.score = to_string(score);
  std::erase(spec.score, ' ');
  const std::string given = unsupported("score", spec.score) + " ";
  for (const Expression::Node& node : score.nodes())
    if (node.op == Expression::Op::literal && node.type == ValueType::real &&
        std::isinf(std::bit_cast<float>(node.value)))
      throw SpecError(given + "with inf in it: a mask hides keys, pass mask = ...");
  if (tables_of(spec).size() > kMostOperands)
    throw SpecError(given + "with this mask: both read " + std::to_string(tables_of(spec).size()) +
                    " tensors, and " + std::to_string(kMostOperands) + " are the most");
  const auto exclude = [&](bool is_so, const std::string& what, const std::string& instead) {
    if (is_so)
      throw SpecError(given + what + ": " + instead);
  };
  exclude(blockwise(spec), "under " + in_quotes(spec.granularity),
          "take " + in_quotes(Granularity::row));
  exclude(spec.smooth_q, "with smooth_q", "leave one of the two out");
  exclude(sums_dp_in_fp16(spec), "with " + assigned("dp_sums", spec.dp_sums),
          "leave one of the two out");
  exclude(is_mixed(spec), "with " + assigned("linear", spec.linear),
          "linear attention has no scores; leave one of the two out");
}

/// Fills in the blocks of lists for what hides single scores.
void resolve_hiding(AttentionSpec& spec) {
  resolve_intervals(spec);
  resolve_mask(spec);
  if (!hides_anywhere(spec))
    return;
  if (is_mixed(spec))
    throw SpecError(hiding_unsupported(spec) + " with " + assigned("linear", spec.linear) +
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
        throw SpecError(unsupported(std::string(label.name), static_cast<int>(value)) +
                        ": its values are " + known_words<T>(", "));
  });
}

void check_head_dim(const AttentionSpec& spec) {
  if (spec.head_dim < kLeastHeadDim || spec.head_dim > kMostHeadDim ||
      spec.head_dim % kHeadDimStep != 0)
    throw SpecError(
        "head dimension " + std::to_string(spec.head_dim) +
        " is not built: supported are multiples of " + std::to_string(kHeadDimStep) + " from " +
        std::to_string(kLeastHeadDim) + " to " + std::to_string(kMostHeadDim) +
        (spec.head_dim <= 0 ? ""
         : spec.head_dim < kMostHeadDim
             ? "; pad q, k and v with zero channels to " +
                   std::to_string(
                       std::max(kLeastHeadDim, (spec.head_dim / kHeadDimStep + 1) * kHeadDimStep)) +
                   " (and keep softmax_scale at that of the unpadded dimension)"
             : ". The registers of a GPU do not hold the sums of more channels: use another "
               "attention for such heads"));
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
    spec.group_kv = sparse ? std::min(grouping.keys.back(), spec.sparse_kv) : grouping.keys.back();
  // With a window only few queries see the first key, so that it is not worth a computation of its
  // own. With lists those that do not list its block must not see it.
  // A score function is applied to scores of tiles alone.
  const bool few_see_it = bounded_before(spec) || sparse || has_score(spec);
  const int most_sink_keys = few_see_it ? 0 : grouping.most_sink_keys;
  if (spec.sink_keys == -1)
    spec.sink_keys = most_sink_keys;
  if (spec.group_q != grouping.queries)
    throw SpecError(unsupported("group_q", spec.group_q) + " under " + in_quotes(spec.granularity) +
                    ": it is " + std::to_string(grouping.queries) +
                    " there; leave it out for that default");
  if (!includes(grouping.keys, spec.group_kv))
    throw SpecError(unsupported("group_kv", spec.group_kv) + " under " +
                    in_quotes(spec.granularity) + ": it is " + listed(grouping.keys, " or ") +
                    " there; leave it out for the default");
  if (spec.sink_keys < 0 || spec.sink_keys > most_sink_keys)
    throw SpecError(unsupported("sink_keys", spec.sink_keys) + " " +
                    (!few_see_it || grouping.most_sink_keys == 0
                         ? "under " + in_quotes(spec.granularity)
                     : sparse          ? "with " + named_lists(spec)
                     : has_score(spec) ? "with a score function"
                                       : "with a window") +
                    ": " +
                    (most_sink_keys ? "1 computes the first key separately, 0 does not"
                                    : "no key is computed separately there, pass 0") +
                    "; leave it out for the default");
}

void resolve_window(AttentionSpec& spec) {
  for (const auto& [name, side] :
       {std::pair("window_left", spec.window_left), std::pair("window_right", spec.window_right)})
    if (side < kNoWindow)
      throw SpecError(unsupported(name, side) +
                      ": it is how many keys a query sees on that side of its "
                      "own, 0 or more; leave it out, or pass -1, for all of them");
  if (spec.causal != Causal::none) // a causal mask hides all keys on the right
    spec.window_right = kNoWindow;
}

void check_sums(const AttentionSpec& spec) {
  if (sums_dq_in_fp16(spec) && (spec.deterministic || width(spec) > kWidestFused ||
                                spec.precision != Precision::gradients16)) {
    std::string causes;
    const auto name = [&](bool is_cause, const std::string& cause) {
      causes += !is_cause ? "" : (causes.empty() ? "" : " and ") + cause;
    };
    name(spec.deterministic, "under 'deterministic', which adds up dQ in one order");
    name(width(spec) > kWidestFused, "for head dimension " + std::to_string(spec.head_dim));
    name(spec.precision != Precision::gradients16, "under precision " + in_quotes(spec.precision));
    throw SpecError(unsupported("dq_sums", spec.dq_sums) + " " + causes +
                    ": it needs an H100 or H200 (sm_90a), a spec without 'deterministic' "
                    "(deterministic=False in Python), with precision " +
                    in_quotes(Precision::gradients16) + " and a head dimension of at most " +
                    std::to_string(kWidestFused) + "; leave dq_sums out for fp32");
  }
  if (sums_dp_in_fp16(spec) && sums_dq_in_fp16(spec))
    throw SpecError(unsupported("dp_sums", spec.dp_sums) + " with " +
                    assigned("dq_sums", spec.dq_sums) +
                    ", which only the family 'ws' of sm_90a has, while dp_sums has the family "
                    "'mma': leave one of the two out for fp32");
  if (sums_dq_in_fp16(spec) && (spec.gradient_kernels == Backward::split || is_sparse(spec)))
    throw SpecError(unsupported("dq_sums", spec.dq_sums) + " with " +
                    (is_sparse(spec) ? named_lists(spec)
                                     : assigned("gradient_kernels", spec.gradient_kernels)) +
                    ", whose kernel of dQ keeps its sums in registers; leave one of the two out");
}

/// Why no kernel forms all gradients, with the options that are the cause; empty if some may.
std::string objection_to_fused(const AttentionSpec& spec) {
  const Int8Products int8 = which_int8(spec.precision);
  const auto precision = [&] { return "precision " + in_quotes(spec.precision); };
  const bool can_be_int8 = !blockwise(spec) && spec.group_kv == 128;
  if (width(spec) > kWidestFused)
    return "for head dimension " + std::to_string(spec.head_dim) + ": the registers suffice for " +
           std::to_string(kWidestFused) + " at most";
  if (is_sparse(spec))
    return "with " + named_lists(spec) + ": only the split kernels walk over them";
  if (has_score(spec))
    return "with a score function: only the split kernels have it";
  if (int8.dq != int8.dv)
    return "under " + precision() + ": one kernel forms dQ and dV both in INT8 (" +
           in_quotes(Precision::six_of_seven) + " or " + in_quotes(Precision::qk16) +
           "), or both in 16 bits (" + in_quotes(Precision::gradients16) +
           " without 'deterministic')";
  if (blockwise(spec) && int8.dq)
    return "under " + in_quotes(spec.granularity) +
           (spec.deterministic ? "" : " and " + precision()) +
           ", where the kernel of dQ finds the scales that dK needs";
  if (spec.deterministic && !int8.dq)
    return "under 'deterministic'" + (can_be_int8 ? " and " + precision() : "") +
           ": it adds dQ up in a fixed order only if dQ and dV are INT8";
  return "";
}

void check_gradient_kernels(const AttentionSpec& spec) {
  if (!is_fused(spec))
    return;
  if (const std::string why = objection_to_fused(spec); !why.empty())
    throw SpecError(unsupported("gradient_kernels", spec.gradient_kernels) + " " + why +
                    "; leave it out for the kernels that the GPU has");
}

void check_linear(const AttentionSpec& spec) {
  if (!is_mixed(spec))
    return;
  const std::string given = unsupported("linear", spec.linear) + " ";
  if (!is_sparse(spec))
    throw SpecError(given + "without lists of blocks, which say what it sees: take a spec with "
                            "sparse_q and sparse_kv, the sizes of blocks, or leave it out");
  if (!has_linear_width(spec))
    throw SpecError(given + "with " + assigned("head_dim", spec.head_dim) +
                    ": its kernels have 64 or 128 channels; pad q, k and v with zero channels for "
                    "attention without it, or take precision='exact' in Python");
  if (spec.max_logits)
    throw SpecError(given + "with max_logits, which are those of exact attention: leave one of the "
                            "two out");
  if (spec.causal != Causal::none)
    throw SpecError(given + "with " + assigned("causal", spec.causal) +
                    ": it would need sums for each token of the blocks on the diagonal; leave one "
                    "of the two out");
}

void check_combinations(const AttentionSpec& spec) {
  if (spec.smooth_q && (spec.packed || !which_int8(spec.precision).s))
    throw SpecError("smooth_q is not supported " +
                    (spec.packed ? "for packed sequences: make a call for each sequence"
                                 : "under precision " + in_quotes(spec.precision) +
                                       ", where queries are not quantised: take " +
                                       in_quotes(Precision::six_of_seven)) +
                    ", or leave it out");
  if (is_sparse(spec) && spec.group_kv > spec.sparse_kv)
    throw SpecError(unsupported("group_kv", spec.group_kv) + " with blocks of " +
                    std::to_string(spec.sparse_kv) +
                    " keys: a quantisation group must lie in one block; leave it out");
  const Grouping& grouping = grouping_of(spec.granularity);
  if (spec.packed && grouping.one_scale)
    throw SpecError("packed sequences are not supported under " + in_quotes(spec.granularity) +
                    ", which keeps maxima for each pair of a sequence's tiles: take " +
                    in_quotes(Granularity::row) + ", or a call for each sequence");
  if (spec.numerics != kNumerics)
    throw SpecError(assigned("numerics", spec.numerics) +
                    " is not what this version computes, which is " + std::to_string(kNumerics) +
                    ": build with the version that wrote the spec, or ask for that");
}

} // namespace

ResolvedSpec resolved(AttentionSpec spec) {
  check_words(spec);
  check_head_dim(spec);
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
