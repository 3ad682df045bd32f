//===- emulated_scores.cpp - Scores of a panel, as the kernels have them ---===//
#include "runtime/reference/emulated_scores.h"
#include "generator/pointwise.h"
#include "runtime/reference/gemm.h"

#include <algorithm>
#include <cmath>

namespace sagebwd::reference {

float dot(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += static_cast<double>(a[i]) * b[i];
  return static_cast<float>(sum);
}

EmulatedScores::EmulatedScores(const Head& head, const AttentionSpec& spec, const ProductPlan& plan,
                               const HeadCopies& copies, int64_t first, int64_t rows)
    : x(rows * head.keys), row_factor(rows, std::abs(head.softmax_scale * kLog2E)), shift(rows, 0),
      of_sink(rows) {
  const int64_t n = head.keys, d = head.channels;
  const float* q = head.q + first * d;
  const float* sink_k = plan.s ? copies.smoothed_k.data() : head.k;
  for (int64_t i = 0; i < rows; ++i) {
    const float score = dot(q + i * d, sink_k, d) * (head.softmax_scale * kLog2E);
    of_sink[i] = score + (score - score); // an infinity becomes NaN
  }
  if (plan.s) {
    const Copy queries = copies.queries_for_scores(first, rows);
    const int64_t depth = queries.channels;
    gemm(rows, n, depth, {queries.levels.data(), depth},
         MatrixView{copies.k_scores.levels.data(), depth}.transposed(), x.data(), n);
    for (int64_t i = 0; i < rows; ++i) {
      row_factor[i] *= queries.token_scale[i];
      for (int64_t j = 0; j < n; ++j)
        x[i * n + j] *= copies.k_scores.token_scale[j];
      if (spec.smooth_k)
        shift[i] = dot(q + i * d, copies.mean.data(), d) * head.softmax_scale;
    }
  } else {
    gemm(rows, n, d, {q, d}, MatrixView<float>{head.k, d}.transposed(), x.data(), n);
  }
  if (head.softmax_scale < 0) // the scores have the sign
    for (float& score : x)
      score = -score;
  if (const float* mean = plan.s ? copies.query_mean(first) : nullptr)
    add_mean_scores(head, copies, mean, spec.sink_keys);
  if (head.score)
    apply_score_function(head, bends_scores(spec), first);
}

/// Adds the scores of the mean that the panel's queries lack; factors are then 1.
void EmulatedScores::add_mean_scores(const Head& head, const HeadCopies& copies, const float* mean,
                                     int64_t sinks) {
  const int64_t n = head.keys, d = head.channels;
  for (int64_t j = sinks; j < n; ++j) {
    const float of_mean =
        dot(mean, copies.smoothed_k.data() + j * d, d) * (head.softmax_scale * kLog2E);
    for (size_t i = 0; i < row_factor.size(); ++i) {
      float& score = x[i * n + j];
      score = static_cast<float>(static_cast<double>(score) * row_factor[i] + of_mean);
    }
  }
  row_factor.assign(row_factor.size(), 1);
}

/// The weight of scores there is 0 beside all others, as in generator/pointwise.cpp.
constexpr float kFarthest = -1e30f;

/// Makes scores what the score function makes of them. Where it bends scores, it is given what
/// smoothing subtracts, which lse then does not lack. Factors are then 1.
void EmulatedScores::apply_score_function(const Head& head, bool bends, int64_t first) {
  const int64_t n = head.keys;
  slope.assign(x.size(), 0);
  for (size_t i = 0; i < row_factor.size(); ++i) {
    const int64_t query = first + static_cast<int64_t>(i);
    const double subtracted = bends ? shift[i] : 0;
    for (int64_t j : head.visible(query)) {
      float& score = x[i * n + j];
      const double log2_score = static_cast<double>(score) * row_factor[i];
      const Scored scored = head.scored(query, j, kLn2 * log2_score + subtracted);
      score = std::max(static_cast<float>(kLog2E * scored.value), kFarthest);
      slope[i * n + j] = static_cast<float>(scored.slope);
    }
    row_factor[i] = 1;
    if (bends)
      shift[i] = 0;
  }
}

} // namespace sagebwd::reference
