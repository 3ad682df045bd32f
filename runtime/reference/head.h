//===- head.h - One head of an attention operation on the CPU -------------===//
//
// Exact and emulated attention both compute a head panel by panel; a panel is some consecutive
// queries, forward and backward. Panels are independent except for dK and dV, which are sums over
// them.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/reference/reference.h"

#include <functional>
#include <memory>

namespace sagebwd::reference {

/// Raises SpecError unless every tensor has the size that the problem implies.
void check(const Inputs&);
/// Raises SpecError unless there are as many lists of blocks as the mask has.
void check_lists(const Inputs&, const Mask&);

/// The data of one query head.
struct Head {
  int64_t queries, keys;
  int channels;
  float softmax_scale;
  Mask mask;
  const float *q, *k, *v;
  const float* dout; ///< null: only the forward
  const float* dlse; ///< null: no gradient through lse
  /// If set, the backward uses it instead of the own forward's result.
  const float* given_o = nullptr;
  const float* given_lse = nullptr;
  const float* k_mean = nullptr;   ///< null: the mean is computed
  const uint8_t* listed = nullptr; ///< the head's part of Inputs::listed
  /// Which scores intervals or Inputs::seen leave, a byte for each; empty: all.
  std::vector<uint8_t> seen = {};
  ScoreFunction score = {};    ///< Inputs::score
  int32_t batch = 0, head = 0; ///< which it is

  /// The keys that at least one of `count` queries from `query` on sees. The queries are of one
  /// block, where there are lists.
  VisibleKeys visible(int64_t query, int64_t count = 1) const {
    VisibleKeys by_mask = keys_of(mask, queries, keys, query, count);
    if (!seen.empty())
      by_mask = by_mask.of(SeenScores{seen.data(), keys, query, std::min(count, queries - query)});
    if (!listed)
      return by_mask;
    const int64_t blocks = ceil_div(keys, mask.spec.sparse_kv);
    return by_mask.of(
        ListedBlocks{listed + query / mask.spec.sparse_q * blocks, mask.spec.sparse_kv});
  }
  /// What the score function makes of a scaled score.
  Scored scored(int64_t query, int64_t key, double s) const {
    return score({batch, head, static_cast<int32_t>(query), static_cast<int32_t>(key)}, s);
  }
  float dlse_of(int64_t query) const { return dlse ? dlse[query] : 0; }
};
/// Head `index` of the B * H heads.
Head head_of(const Inputs&, const Mask&, int64_t index);

/// The results for `rows` queries from `first` on; p, dp and ds are rows x keys.
template <typename T> struct Panel {
  int64_t first = 0, rows = 0;
  std::vector<T> o = {}, lse = {}, delta = {}, dq = {}, p = {}, dp = {}, ds = {};
  std::vector<T> largest = {}; ///< each query's largest score; -inf: it sees no key
};

/// The computation of one head. dk and dv are complete after the last panel. They are of this query
/// head alone and must be summed over the heads that share its keys; dk has not been multiplied by
/// the softmax scale.
template <typename T> class HeadComputation {
public:
  explicit HeadComputation(const Head& head) {
    if (!head.dout)
      return;
    dk.assign(head.keys * head.channels, 0);
    dv.assign(head.keys * head.channels, 0);
  }
  virtual ~HeadComputation() = default;
  virtual Panel<T> panel(int64_t first, int64_t rows) = 0;
  std::vector<T> dk, dv;
};

std::unique_ptr<HeadComputation<double>> exact_head(const Head&);
std::unique_ptr<HeadComputation<float>> emulated_head(const Head&, const AttentionSpec&,
                                                      const ProductPlan&, bool round_outputs);

/// The queries per panel of the exact computation, which works with any number. The emulation needs
/// one quantisation group.
inline constexpr int64_t kExactPanel = 64;

/// Runs every head of `in`, `panel_rows` queries at a time, and collects the outputs.
template <typename T>
Outputs<T> run_heads(const Inputs& in, bool keep_matrices, int64_t panel_rows,
                     const std::function<std::unique_ptr<HeadComputation<T>>(int64_t head)>& make);

/// `scale` times the sum of each group of heads that share keys, added in the order of the heads.
template <typename T>
std::vector<T> sum_over_groups(const Problem&, const std::vector<std::vector<T>>& of_head, T scale);

/// Raises SpecError if the emulation does not support the spec on these inputs.
void check(const Inputs&, const AttentionSpec& resolved);

} // namespace sagebwd::reference
