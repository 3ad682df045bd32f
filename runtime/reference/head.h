//===- head.h - One head of an attention operation on the CPU -------------===//
//
// Exact and emulated attention both go over a head panel by panel of consecutive queries, forward
// and backward at once: a panel needs nothing of the others, but for the sums dK and dV.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/reference/reference.h"

#include <functional>
#include <memory>

namespace sagebwd::reference {

/// Raises SpecError unless every tensor has the size that the problem implies.
void check(const Inputs&);

/// The data of one query head.
struct Head {
  int64_t queries, keys;
  int channels;
  float softmax_scale;
  Mask mask;
  const float *q, *k, *v;
  const float* dout;              ///< null: forward only
  const float* dlse;              ///< null: no gradient through lse
  const float* given_o = nullptr; ///< what the backward starts from instead of its own forward
  const float* given_lse = nullptr;
  const float* k_mean = nullptr; ///< null: computed

  /// The keys that any of `count` queries from `query` on sees.
  VisibleKeys visible(int64_t query, int64_t count = 1) const {
    return keys_of(mask, queries, keys, query, count);
  }
};
/// Head `index` of B * H.
Head head_of(const Inputs&, const Mask&, int64_t index);

/// What a panel of `rows` queries from `first` on gives; p, dp and ds are rows x keys.
template <typename T> struct Panel {
  int64_t first = 0, rows = 0;
  std::vector<T> o, lse, delta, dq, p, dp, ds;
};

/// A computation of one head. dk and dv are complete after the last panel. They are this head's
/// alone, to be summed over the heads that share its keys, and dk lacks the softmax scale.
template <typename T> class HeadComputation {
public:
  virtual ~HeadComputation() = default;
  virtual Panel<T> panel(int64_t first, int64_t rows) = 0;
  std::vector<T> dk, dv;
};

std::unique_ptr<HeadComputation<double>> exact_head(const Head&);
std::unique_ptr<HeadComputation<float>> emulated_head(const Head&, const AttentionSpec&,
                                                      const ProductPlan&, bool round_outputs);

/// Queries per panel of the exact computation, which takes any; the emulation takes one
/// quantisation group.
inline constexpr int64_t kExactPanel = 64;

/// Runs every head of `in`, `panel_rows` queries at a time, and puts the outputs together.
template <typename T>
Outputs<T> run_heads(const Inputs& in, bool keep_matrices, int64_t panel_rows,
                     const std::function<std::unique_ptr<HeadComputation<T>>(int64_t head)>& make);

/// `scale` times the sum of each group of heads that share keys, in the order of the heads.
template <typename T>
std::vector<T> sum_over_groups(const Problem&, const std::vector<std::vector<T>>& of_head, T scale);

/// Raises SpecError where the emulation cannot follow the spec on these inputs.
void check(const Inputs&, const AttentionSpec& resolved);

} // namespace sagebwd::reference
