//===- head.cpp - Heads of an attention operation on the CPU --------------===//
#include "runtime/reference/head.h"
#include "generator/pointwise.h"
#include "runtime/compile_width.h"
#include "runtime/parallel_for.h"

#include "runtime/reference/gemm.h" // kExactIntegerDepth

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace sagebwd::reference {
namespace {

void expect_size(const char* name, size_t given, int64_t expected, bool optional) {
  if (given == static_cast<size_t>(expected) || (optional && given == 0))
    return;
  throw SpecError(std::string(name) + " holds " + std::to_string(given) +
                  " values; the problem's sizes imply " + std::to_string(expected) +
                  (optional ? " (or none)" : ""));
}

} // namespace

void check(const Inputs& in) {
  const Problem& p = in.problem;
  if (p.batch < 1 || p.heads < 1 || p.heads_kv < 1 || p.seq_q < 1 || p.seq_kv < 1 ||
      in.head_dim < 1)
    throw SpecError("the reference needs sizes of at least one; got batch " +
                    std::to_string(p.batch) + ", heads " + std::to_string(p.heads) + "/" +
                    std::to_string(p.heads_kv) + ", lengths " + std::to_string(p.seq_q) + "/" +
                    std::to_string(p.seq_kv) + ", head dim " + std::to_string(in.head_dim));
  if (p.heads % p.heads_kv != 0)
    throw SpecError(std::to_string(p.heads) + " query heads cannot share " +
                    std::to_string(p.heads_kv) +
                    " key/value heads: make the first a multiple of the second");
  if (in.softmax_scale && !std::isfinite(*in.softmax_scale))
    throw SpecError("softmax_scale " + std::to_string(*in.softmax_scale) +
                    " is not supported: give a finite number, or none for 1/sqrt(head_dim)");
  const int64_t rows = p.batch * p.heads * p.seq_q;
  const int64_t keys = p.batch * p.heads_kv * p.seq_kv * in.head_dim;
  expect_size("q", in.q.size(), rows * in.head_dim, false);
  expect_size("k", in.k.size(), keys, false);
  expect_size("v", in.v.size(), keys, false);
  expect_size("dout", in.dout.size(), rows * in.head_dim, true);
  expect_size("dlse", in.dlse.size(), rows, true);
  expect_size("k_mean", in.k_mean.size(), p.batch * p.heads_kv * in.head_dim, true);
}

/// Bytes of Inputs::listed that are of one head.
int64_t bytes_of_lists(const AttentionSpec& spec, const Problem& p) {
  return list_blocks(Tokens::queries, spec, p) * list_blocks(Tokens::keys, spec, p);
}

/// The size of Inputs::intervals.
int64_t numbers_of_intervals(const Inputs& in, const AttentionSpec& spec) {
  return (in.sequences_share_intervals ? 1 : in.problem.batch) *
         (in.heads_share_intervals ? 1 : in.problem.heads_kv) * in.problem.seq_kv * spec.intervals;
}

void check_lists(const Inputs& in, const Mask& mask) {
  const Problem& p = in.problem;
  const bool are_given = is_sparse(mask.spec) && !hides_anywhere(mask.spec);
  expect_size("listed", in.listed.size(),
              are_given ? p.batch * p.heads * bytes_of_lists(mask.spec, p) : 0, false);
  expect_size("intervals", in.intervals.size(), numbers_of_intervals(in, mask.spec), false);
  if (bool{in.score} != has_score(mask.spec))
    throw SpecError(in.score ? "a score function is given, and the spec has none"
                             : "the spec has a score function, which the inputs lack: pass what "
                               "score_by_spec() gives");
  expect_size("seen", in.seen.size(),
              mask.spec.mask.empty() ? 0 : p.batch * p.heads * p.seq_q * p.seq_kv, false);
}

void check(const Inputs& in, const AttentionSpec& spec) {
  check(in);
  check_lists(in, spec);
  if (spec.head_dim != in.head_dim)
    throw SpecError("the spec's head dim is " + std::to_string(spec.head_dim) + ", the inputs' " +
                    std::to_string(in.head_dim) + ": they must agree");
  const int64_t depth = std::max({spec.group_q, spec.group_kv, spec.head_dim});
  if (spec.group_q < 1 || spec.group_kv < 1 || depth > kExactIntegerDepth)
    throw SpecError("groups of " + std::to_string(spec.group_q) + " queries and " +
                    std::to_string(spec.group_kv) + " keys at head dim " +
                    std::to_string(spec.head_dim) + " cannot be emulated: each must lie in 1.." +
                    std::to_string(kExactIntegerDepth) + " (resolved() fills in the defaults)");
  if (channel_tokens_q(spec) % spec.group_q != 0 || channel_tokens_kv(spec) % spec.group_kv != 0)
    throw SpecError("groups of " + std::to_string(spec.group_q) + " queries and " +
                    std::to_string(spec.group_kv) + " keys cannot be emulated under '" +
                    value_text(spec.granularity) + "': they must divide the " +
                    std::to_string(channel_tokens_q(spec)) + " tokens that share a scale there");
  if (spec.sink_keys < 0 || spec.sink_keys > grouping_of(spec.granularity).most_sink_keys)
    throw SpecError("sink_keys = " + std::to_string(spec.sink_keys) +
                    " cannot be emulated under '" + value_text(spec.granularity) +
                    "' (resolved() fills in the default)");
}

TableOfNumbers table_of_floats(int64_t rows, int64_t columns, const std::vector<float>& floats) {
  TableOfNumbers table{rows, columns, {}};
  for (float x : floats)
    table.numbers.push_back(std::bit_cast<int32_t>(x));
  return table;
}

namespace {

/// Reads the operands of an expression of a spec.
ReadOperand reader_of(const AttentionSpec& spec, const Expression& expression,
                      const std::vector<TableOfNumbers>& tables) {
  return [named = tables_of(spec), operands = expression.operands(),
          &tables](size_t operand, int32_t i, int32_t j) -> double {
    size_t at = 0; // a mask and a score may give tables the same name
    const bool of_score = operands[operand].type.type == ValueType::real;
    while (named[at].name != operands[operand].name || named[at].of_score != of_score)
      ++at;
    const TableOfNumbers& table = tables.at(at);
    if (operands[operand].type.indices == 1)
      std::swap(i, j); // the only row
    const int64_t row = std::clamp<int64_t>(i, 0, table.rows - 1);
    const int64_t column = std::clamp<int64_t>(j, 0, table.columns - 1);
    const int32_t bits = table.numbers[static_cast<size_t>(row * table.columns + column)];
    return of_score ? double{std::bit_cast<float>(bits)} : bits;
  };
}

} // namespace

ScoreFunction score_by_spec(const AttentionSpec& spec, const std::vector<TableOfNumbers>& tables) {
  return [score = score_of(spec), slope = derivative(score_of(spec)), spec, tables](Point at,
                                                                                    double s) {
    at.s = s;
    return Scored{evaluate(score, at, reader_of(spec, score, tables)),
                  evaluate(slope, at, reader_of(spec, slope, tables))};
  };
}

std::vector<uint8_t> seen_by_mask(const AttentionSpec& spec, const Problem& p,
                                  const std::vector<TableOfNumbers>& tables) {
  check_size_of_mask(p);
  const Expression& mask = mask_of(spec);
  const ReadOperand read = reader_of(spec, mask, tables);
  std::vector<uint8_t> seen;
  seen.reserve(static_cast<size_t>(p.batch * p.heads * p.seq_q * p.seq_kv));
  for (int32_t b = 0; b < p.batch; ++b)
    for (int32_t h = 0; h < p.heads; ++h)
      for (int32_t q = 0; q < p.seq_q; ++q)
        for (int32_t k = 0; k < p.seq_kv; ++k)
          seen.push_back(evaluate(mask, {.b = b, .h = h, .q = q, .k = k}, read, true) != 0);
  return seen;
}

namespace {

/// Which scores a head's intervals leave (runtime/attention.h).
std::vector<uint8_t> seen_by_intervals(const AttentionSpec& spec, const Problem& p,
                                       const int32_t* numbers) {
  const bool causal = spec.causal != Causal::none;
  std::vector<uint8_t> seen;
  for (int64_t query = 0; query < p.seq_q; ++query)
    for (int64_t key = 0; key < p.seq_kv; ++key) {
      const int32_t* of = numbers + key * spec.intervals;
      const auto in = [&](int64_t begin, int64_t end) { return begin <= query && query < end; };
      const bool hidden = spec.intervals == 1   ? query >= of[0]
                          : spec.intervals == 4 ? in(of[0], of[1]) || in(of[2], of[3])
                          : causal              ? in(of[0], of[1])
                                                : query >= of[0] || query < of[1];
      seen.push_back(!hidden);
    }
  return seen;
}

/// Which scores of a query head are seen beside the mask's edges and lists; empty: all.
std::vector<uint8_t> seen_of(const Inputs& in, const AttentionSpec& spec, int64_t index) {
  const Problem& p = in.problem;
  if (!in.seen.empty()) {
    const auto first = in.seen.begin() + index * p.seq_q * p.seq_kv;
    return {first, first + p.seq_q * p.seq_kv};
  }
  if (in.intervals.empty())
    return {};
  const int64_t sequence = in.sequences_share_intervals ? 0 : index / p.heads;
  const int64_t kv_head = index % p.heads / (p.heads / p.heads_kv);
  const int64_t head = in.heads_share_intervals ? sequence : sequence * p.heads_kv + kv_head;
  return seen_by_intervals(spec, p, in.intervals.data() + head * p.seq_kv * spec.intervals);
}

} // namespace

Head head_of(const Inputs& in, const Mask& mask, int64_t index) {
  const Problem& p = in.problem;
  const int64_t batch = index / p.heads, head = index % p.heads;
  const int64_t kv = batch * p.heads_kv + head / (p.heads / p.heads_kv);
  const int64_t query_offset = index * p.seq_q * in.head_dim;
  const int64_t key_offset = kv * p.seq_kv * in.head_dim;
  const bool has_lists = is_sparse(mask.spec) && !in.listed.empty();
  const int64_t lists = has_lists ? bytes_of_lists(mask.spec, p) : 0;
  const double usual_scale = 1 / std::sqrt(static_cast<double>(in.head_dim));
  return {
      .queries = p.seq_q,
      .keys = p.seq_kv,
      .channels = in.head_dim,
      .softmax_scale = in.softmax_scale.value_or(static_cast<float>(usual_scale)),
      .mask = mask,
      .q = in.q.data() + query_offset,
      .k = in.k.data() + key_offset,
      .v = in.v.data() + key_offset,
      .dout = in.dout.empty() ? nullptr : in.dout.data() + query_offset,
      .dlse = in.dlse.empty() ? nullptr : in.dlse.data() + index * p.seq_q,
      .k_mean = in.k_mean.empty() ? nullptr : in.k_mean.data() + kv * in.head_dim,
      .listed = lists == 0 ? nullptr : in.listed.data() + index * lists,
      .seen = seen_of(in, mask.spec, index),
      .score = in.score,
      .batch = static_cast<int32_t>(batch),
      .head = static_cast<int32_t>(head),
  };
}

namespace {

/// The largest of a head's scores in one sequence and in another one, or in panels of one. NaN is
/// above all.
template <typename T> T larger(T a, T b) { return std::isnan(a) || a > b ? a : b; }

template <typename T> T largest_of(const Panel<T>& panel) {
  T largest = -std::numeric_limits<T>::infinity();
  for (size_t i = 0; i < panel.largest.size(); ++i)
    largest = larger(largest, std::isnan(panel.lse[i]) ? panel.lse[i] : panel.largest[i]);
  return largest;
}

} // namespace

template <typename T>
Outputs<T> run_heads(const Inputs& in, bool keep_matrices, int64_t panel_rows,
                     const std::function<std::unique_ptr<HeadComputation<T>>(int64_t)>& make) {
  const Problem& p = in.problem;
  const int64_t heads = p.batch * p.heads, queries = p.seq_q, channels = in.head_dim;
  const bool backward = !in.dout.empty();
  Outputs<T> out;
  const auto size = [&](std::vector<T>& tensor, int64_t columns, bool wanted) {
    if (wanted)
      tensor.resize(heads * queries * columns);
  };
  size(out.o, channels, true);
  size(out.lse, 1, true);
  size(out.delta, 1, backward);
  size(out.dq, channels, backward);
  size(out.p, p.seq_kv, keep_matrices);
  size(out.dp, p.seq_kv, keep_matrices && backward);
  size(out.ds, p.seq_kv, keep_matrices && backward);

  std::vector<std::vector<T>> dk(heads), dv(heads);
  std::vector<T> largest(heads, -std::numeric_limits<T>::infinity());
  parallel_for(heads, usable_cores(), [&](int64_t head) {
    auto computation = make(head);
    for (int64_t first = 0; first < queries; first += panel_rows) {
      check_interrupt();
      const Panel<T> panel = computation->panel(first, std::min(panel_rows, queries - first));
      const auto put = [&](const std::vector<T>& from, std::vector<T>& to, int64_t columns) {
        if (!to.empty())
          std::copy(from.begin(), from.end(), to.begin() + (head * queries + first) * columns);
      };
      put(panel.o, out.o, channels);
      put(panel.lse, out.lse, 1);
      put(panel.delta, out.delta, 1);
      put(panel.dq, out.dq, channels);
      put(panel.p, out.p, p.seq_kv);
      put(panel.dp, out.dp, p.seq_kv);
      put(panel.ds, out.ds, p.seq_kv);
      largest[head] = larger(largest[head], largest_of(panel));
    }
    dk[head] = std::move(computation->dk);
    dv[head] = std::move(computation->dv);
  });
  out.max_logits.assign(largest.begin(), largest.begin() + p.heads);
  for (int64_t head = p.heads; head < heads; ++head)
    out.max_logits[head % p.heads] = larger(out.max_logits[head % p.heads], largest[head]);
  if (!backward)
    return out;

  out.dk = sum_over_groups<T>(p, dk, head_of(in, Causal::none, 0).softmax_scale);
  out.dv = sum_over_groups<T>(p, dv, 1);
  return out;
}

template <typename T>
std::vector<T> sum_over_groups(const Problem& p, const std::vector<std::vector<T>>& of_head,
                               T scale) {
  const int64_t group = p.heads / p.heads_kv, head_size = of_head[0].size();
  std::vector<T> result(p.batch * p.heads_kv * head_size);
  parallel_for(p.batch * p.heads_kv, usable_cores(), [&](int64_t kv) {
    T* sum = result.data() + kv * head_size;
    for (int64_t head = kv * group; head < (kv + 1) * group; ++head)
      for (int64_t i = 0; i < head_size; ++i)
        sum[i] += of_head[head][i];
    for (int64_t i = 0; i < head_size; ++i)
      sum[i] *= scale;
  });
  return result;
}

template std::vector<float> sum_over_groups(const Problem&, const std::vector<std::vector<float>>&,
                                            float);
template std::vector<double> sum_over_groups(const Problem&,
                                             const std::vector<std::vector<double>>&, double);
template Outputs<float>
run_heads(const Inputs&, bool, int64_t,
          const std::function<std::unique_ptr<HeadComputation<float>>(int64_t)>&);
template Outputs<double>
run_heads(const Inputs&, bool, int64_t,
          const std::function<std::unique_ptr<HeadComputation<double>>(int64_t)>&);

} // namespace sagebwd::reference
