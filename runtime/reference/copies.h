//===- copies.h - The INT8 copies that pre-passes write -------------------===//
#pragma once

#include "runtime/reference/head.h"

namespace sagebwd::reference {

/// A quantised tokens x channels matrix.
struct Copy {
  std::vector<float> levels;      ///< integers
  std::vector<float> token_scale; ///< for products that sum over channels: one a token
  std::vector<float> unit_scale;  ///< for those that sum over tokens: units x channels
  int64_t channels = 0, unit = 0; ///< tokens in a unit

  const float* token(int64_t index) const { return levels.data() + index * channels; }
  const float* scales_at(int64_t index) const {
    return unit_scale.data() + index / unit * channels;
  }
};

/// `sharing` consecutive tokens have one scale.
Copy copy_by_tokens(const float* x, int64_t tokens, int64_t channels, int64_t sharing);

/// Keys of S: one scale for 8 of 32, those that one lane of a quad holds as columns of scores,
/// which are 2t, 2t+1, 2t+8, 2t+9, .. 2t+25 of lane t.
Copy copy_by_key_octets(const float* x, int64_t keys, int64_t channels);

/// The largest magnitude of at most 256 tokens of a head, evenly spaced from the first on; 1 where
/// they are zeros or not finite.
float sampled_magnitude(const float* x, int64_t tokens, int64_t channels);

/// One scale for each channel of `unit` tokens, or one for all channels of a unit. So that sums can
/// be brought from any unit to any other, a channel counts as zeros below 2^-60 of `magnitude`, the
/// head's, or of 1 where that is less.
Copy copy_by_channels(const float* x, int64_t tokens, int64_t channels, int64_t unit,
                      bool one_scale, float magnitude = 1);

/// Powers of two that bring the rows of each unit to one magnitude, that of the unit's mean: within
/// -100..100, of the logarithms of the rows' largest magnitudes, linear between powers of two. Rows
/// less than half an octave from the mean have one exponent, wherever that lies: rounding each
/// row's own logarithm would tear rows of like magnitude apart. Rows below 2^-119 and those that
/// are not finite have the mean's, or that of sampled_magnitude() where a unit has no others.
std::vector<int> row_exponents(const float* x, int64_t rows, int64_t channels, int64_t unit);

/// All that the pre-passes make of one head.
class HeadCopies {
public:
  HeadCopies(const Head&, const AttentionSpec&, const ProductPlan&);

  std::vector<float> mean;       ///< taken off the keys, where they are smoothed
  std::vector<float> smoothed_k; ///< keys less their mean, or keys; the first one included
  std::vector<float> k_rows;     ///< the same in 16 bits, for dQ
  Copy k_scores, v_transposed;
  /// For the backward pass.
  Copy k_transposed, v_rows, q_transposed, dout_transposed;
  std::vector<float> douts;   ///< for dP: rows of dO over 2^exponent, of 16 bits
  std::vector<int> exponents; ///< 0 but where dV is INT8 and rows share scales

  /// Of rows of one group, from query `first` on.
  Copy queries_for_scores(int64_t first, int64_t rows) const;
  /// What smoothing takes off a query; of what takes nothing, null.
  const float* query_mean(int64_t query) const;

private:
  void smooth_keys(const Head&);
  void smooth_queries(const Head&, bool smooth);
  void scale_douts(const Head&, bool int8_dv);
  std::vector<float> without_sinks(const float* keys, int64_t count) const;
  /// As scores have them; rotated, with the zeros that fill the kernels' width.
  std::vector<float> rotated(const float* x, int64_t tokens) const;

  AttentionSpec spec_;
  bool one_scale_;
  std::vector<float> query_means_; ///< of each unit, where queries are smoothed
  std::vector<float> smoothed_q_;  ///< queries less their unit's mean, or queries
};

} // namespace sagebwd::reference
