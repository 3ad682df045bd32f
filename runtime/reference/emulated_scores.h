//===- emulated_scores.h - Scores of a panel, as the kernels have them -----===//
#pragma once

#include "runtime/reference/copies.h"
#include "runtime/reference/head.h"

namespace sagebwd::reference {

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

/// The scores of some consecutive queries with all keys of a head. Those of the first key, where it
/// is computed separately, are also in `of_sink`.
struct EmulatedScores {
  EmulatedScores() = default;
  EmulatedScores(const Head&, const AttentionSpec&, const ProductPlan&, const HeadCopies&,
                 int64_t first, int64_t rows);

  std::vector<float> x;          ///< (rows, keys), without the queries' factors
  std::vector<float> row_factor; ///< with which scores are in units of log2
  std::vector<float> shift;      ///< what smoothing subtracts from lse
  std::vector<float> of_sink;    ///< in units of log2
  std::vector<float> slope;      ///< (rows, keys): that of the score function; empty without one

private:
  void add_mean_scores(const Head&, const HeadCopies&, const float* mean, int64_t sinks);
  void apply_score_function(const Head&, bool bends, int64_t first);
};

/// Summed in FP64.
float dot(const float* a, const float* b, int64_t count);

} // namespace sagebwd::reference
