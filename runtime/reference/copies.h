//===- copies.h - The quantised copies that the pre-passes write ----------===//
#pragma once

#include "runtime/reference/head.h"

namespace sagebwd::reference {

/// A quantised tokens x channels matrix.
struct Copy {
  std::vector<float> levels;      ///< integer values
  std::vector<float> token_scale; ///< one for each token, for products that sum over channels
  std::vector<float> unit_scale;  ///< units x channels, for products that sum over tokens
  int64_t channels = 0, unit = 0; ///< `unit` is the number of tokens in a unit

  const float* token(int64_t index) const { return levels.data() + index * channels; }
  const float* scales_at(int64_t index) const {
    return unit_scale.data() + index / unit * channels;
  }
};

/// Quantises a tensor; each group of `sharing` consecutive tokens has one scale.
Copy copy_by_tokens(const float* x, int64_t tokens, int64_t channels, int64_t sharing);

/// Quantises the keys of S. Eight of every 32 keys have one scale: the keys that one lane of a quad
/// holds as columns of scores. For lane t these are the keys 2t, 2t+1, 2t+8, 2t+9, ..., 2t+25.
Copy copy_by_key_octets(const float* x, int64_t keys, int64_t channels);

/// The largest magnitude among at most 256 tokens of a head, evenly spaced from the first token on;
/// 1 if all are zeros or one is not finite.
float sampled_magnitude(const float* x, int64_t tokens, int64_t channels);

/// Quantises units of `unit` tokens, with one scale for each channel of a unit, or with one for all
/// channels. If a channel's largest magnitude is below 2^-60 * min(`magnitude`, 1), the channel
/// counts as zeros, so that sums can be converted from the unit of any scale to that of any other.
/// `magnitude` is the head's.
Copy copy_by_channels(const float* x, int64_t tokens, int64_t channels, int64_t unit,
                      bool one_scale, float magnitude = 1);

/// Powers of two (exponents within -100..100) that bring the rows of each unit to the magnitude of
/// the unit's mean. The mean is taken over the logarithms of the rows' largest magnitudes, linear
/// between powers of two. All rows less than half an octave from the mean have the same exponent,
/// wherever the mean lies: if each row's own logarithm were rounded, rows of similar magnitude
/// could get different exponents. Rows below 2^-119 and rows that are not finite have the mean's
/// exponent; if a unit has only such rows, that of sampled_magnitude().
std::vector<int> row_exponents(const float* x, int64_t rows, int64_t channels, int64_t unit);

/// All copies that the pre-passes make of one head.
class HeadCopies {
public:
  HeadCopies(const Head&, const AttentionSpec&, const ProductPlan&);

  std::vector<float> mean;       ///< subtracted from the keys if they are smoothed
  std::vector<float> v_mean;     ///< subtracted from the values of v_transposed, or zeros
  std::vector<float> smoothed_k; ///< keys minus their mean, or the keys; with the first key
  std::vector<float> k_rows;     ///< smoothed_k in 16 bits, for dQ
  Copy k_scores, v_transposed;
  /// These copies are for the backward pass.
  Copy k_transposed, v_rows, q_transposed, dout_transposed;
  std::vector<float> douts;   ///< for dP: rows of dO divided by 2^exponent, in 16 bits
  std::vector<int> exponents; ///< all 0 unless dV is INT8 and rows share scales

  /// The copy of the queries of one group, from query `first` on.
  Copy queries_for_scores(int64_t first, int64_t rows) const;
  /// The mean that smoothing subtracts from a query; null if it subtracts nothing.
  const float* query_mean(int64_t query) const;

private:
  void smooth_keys(const Head&);
  void smooth_queries(const Head&, bool smooth);
  std::vector<float> smoothed_values(const Head&, bool smooth);
  void scale_douts(const Head&, bool int8_dv);
  std::vector<float> without_sinks(const float* keys, int64_t count) const;
  /// The tokens as the scores' product has them; if rotated, with zeros up to the kernels' width.
  std::vector<float> rotated(const float* x, int64_t tokens) const;

  AttentionSpec spec_;
  bool one_scale_;
  std::vector<float> query_means_; ///< of each unit, if queries are smoothed
  std::vector<float> smoothed_q_;  ///< queries minus their unit's mean, or the queries
};

} // namespace sagebwd::reference
