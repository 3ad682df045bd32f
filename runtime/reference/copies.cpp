//===- copies.cpp - The quantised copies that the pre-passes write --------===//
#include "runtime/reference/copies.h"
#include "runtime/reference/quantizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace sagebwd::reference {
namespace {

constexpr float kLeastBeside = 0x1p-60f;
constexpr int64_t kSampledTokens = 256;
constexpr int kMostExponent = 100;

/// Quantises all of these tokens with one scale.
void quantize_together(Copy& copy, const float* x, const std::vector<int64_t>& tokens) {
  const int64_t d = copy.channels, count = static_cast<int64_t>(tokens.size());
  std::vector<float> gathered(count * d);
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(x + tokens[i] * d, d, gathered.begin() + i * d);
  const Quantized part = quantize(gathered.data(), count, d, d, Sharing::whole, kSignedLevels);
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(part.levels.begin() + i * d, d, copy.levels.begin() + tokens[i] * d);
    copy.token_scale[tokens[i]] = part.row_scale[i];
  }
}

Copy empty_copy(int64_t tokens, int64_t channels) {
  Copy copy;
  copy.levels.resize(tokens * channels);
  copy.token_scale.resize(tokens);
  copy.channels = channels;
  return copy;
}

} // namespace

Copy copy_by_tokens(const float* x, int64_t tokens, int64_t channels, int64_t sharing) {
  Copy copy = empty_copy(tokens, channels);
  for (int64_t first = 0; first < tokens; first += sharing) {
    std::vector<int64_t> together;
    for (int64_t token = first; token < std::min(first + sharing, tokens); ++token)
      together.push_back(token);
    quantize_together(copy, x, together);
  }
  return copy;
}

Copy copy_by_key_octets(const float* x, int64_t keys, int64_t channels) {
  Copy copy = empty_copy(keys, channels);
  for (int64_t first = 0; first < keys; first += 32) {
    std::array<std::vector<int64_t>, 4> of_lane;
    for (int64_t key = first; key < std::min(first + 32, keys); ++key)
      of_lane[key / 2 % 4].push_back(key);
    for (const std::vector<int64_t>& together : of_lane)
      quantize_together(copy, x, together);
  }
  return copy;
}

float sampled_magnitude(const float* x, int64_t tokens, int64_t channels) {
  const int64_t step = std::max<int64_t>(1, (tokens + kSampledTokens - 1) / kSampledTokens);
  float largest = 0;
  for (int64_t token = 0; token < tokens; token += step)
    for (int64_t c = 0; c < channels; ++c) {
      const float magnitude = std::fabs(x[token * channels + c]);
      if (!std::isfinite(magnitude))
        return 1;
      largest = std::max(largest, magnitude);
    }
  return largest > 0 ? largest : 1;
}

Copy copy_by_channels(const float* x, int64_t tokens, int64_t channels, int64_t unit,
                      bool one_scale, float magnitude) {
  const float smallest =
      one_scale ? kSmallest : std::max(kSmallest, std::min(magnitude, 1.0f) * kLeastBeside);
  Copy copy;
  copy.channels = channels;
  copy.unit = unit;
  for (int64_t first = 0; first < tokens; first += unit) {
    const Quantized part =
        quantize(x + first * channels, std::min(unit, tokens - first), channels, channels,
                 one_scale ? Sharing::whole : Sharing::column, kSignedLevels, smallest);
    copy.levels.insert(copy.levels.end(), part.levels.begin(), part.levels.end());
    std::vector<float> scales = part.column_scale;
    if (one_scale)
      std::fill(scales.begin(), scales.end(), part.row_scale[0]);
    copy.unit_scale.insert(copy.unit_scale.end(), scales.begin(), scales.end());
  }
  return copy;
}

std::vector<int> row_exponents(const float* x, int64_t rows, int64_t channels, int64_t unit) {
  // The bits of a positive float are its logarithm, linear between powers of two. With 13 bits of
  // fraction a sum over a unit's rows fits into 32 bits.
  constexpr int kFraction = 13, kOctave = 1 << kFraction;
  const float magnitude = sampled_magnitude(x, rows, channels);
  const int of_head =
      std::bit_cast<int32_t>(magnitude < kSmallest ? 1.0f : magnitude) >> (23 - kFraction);
  std::vector<int> exponents(rows, 0);
  for (int64_t first = 0; first < rows; first += unit) {
    const int64_t end = std::min(first + unit, rows);
    std::vector<int> logarithms(end - first, 0);
    int sum = 0, count = 0;
    for (int64_t i = first; i < end; ++i) {
      int32_t largest = 0; // magnitudes compare as integers, so a NaN is not lost
      for (int64_t c = 0; c < channels; ++c)
        largest = std::max(largest, std::bit_cast<int32_t>(x[i * channels + c]) & 0x7fffffff);
      const auto magnitude = std::bit_cast<float>(largest);
      if (!std::isfinite(magnitude) || magnitude < kSmallest)
        continue;
      logarithms[i - first] = largest >> (23 - kFraction);
      sum += logarithms[i - first];
      ++count;
    }
    const int mean = count == 0 ? of_head : sum / count;
    for (int64_t i = first; i < end; ++i) {
      const int own = logarithms[i - first], logarithm = own ? own : mean;
      exponents[i] =
          std::clamp(((logarithm - mean + kOctave / 2) >> kFraction) + (mean >> kFraction) - 127,
                     -kMostExponent, kMostExponent);
    }
  }
  return exponents;
}

HeadCopies::HeadCopies(const Head& head, const AttentionSpec& spec, const ProductPlan& plan)
    : spec_(spec), one_scale_(grouping_of(spec.granularity).one_scale) {
  const int64_t n = head.keys, d = head.channels;
  smooth_keys(head);
  smooth_queries(head, spec.smooth_q && plan.s);
  const std::vector<float> k = without_sinks(smoothed_k.data(), n);
  const std::vector<float> v =
      without_sinks(smoothed_values(head, spec.smooth_v && plan.pv).data(), n);
  const auto over_keys = [&](const std::vector<float>& x, const float* raw) {
    return copy_by_channels(x.data(), n, d, channel_tokens_kv(spec), one_scale_,
                            sampled_magnitude(raw, n, d));
  };
  if (plan.s) {
    const std::vector<float> x = rotated(k.data(), n);
    const auto depth = static_cast<int64_t>(x.size()) / n;
    k_scores = one_scale_ ? copy_by_tokens(x.data(), n, depth, spec.group_kv)
                          : copy_by_key_octets(x.data(), n, depth);
  }
  if (plan.pv)
    v_transposed = over_keys(v, head.v);
  if (!head.dout)
    return;
  if (plan.dp)
    v_rows = copy_by_tokens(head.v, n, d, one_scale_ ? spec.group_kv : 1);
  if (plan.dq)
    k_transposed = over_keys(k, head.k);
  else
    for (float x : smoothed_k)
      k_rows.push_back(round_to(spec.dtype, x));
  if (plan.dk)
    q_transposed = copy_by_channels(smoothed_q_.data(), head.queries, d, channel_tokens_q(spec),
                                    one_scale_, sampled_magnitude(head.q, head.queries, d));
  scale_douts(head, plan.dv);
}

Copy HeadCopies::queries_for_scores(int64_t first, int64_t rows) const {
  const std::vector<float> x = rotated(smoothed_q_.data() + first * spec_.head_dim, rows);
  return copy_by_tokens(x.data(), rows, static_cast<int64_t>(x.size()) / rows,
                        one_scale_ ? spec_.group_q : 1);
}

void HeadCopies::smooth_keys(const Head& head) {
  const int64_t n = head.keys, d = head.channels;
  smoothed_k.assign(head.k, head.k + n * d);
  if (!spec_.smooth_k)
    return;
  if (head.k_mean) {
    mean.assign(head.k_mean, head.k_mean + d);
  } else {
    std::vector<double> sums(d, 0);
    for (int64_t i = 0; i < n * d; ++i)
      sums[i % d] += head.k[i];
    for (double sum : sums)
      mean.push_back(static_cast<float>(sum / static_cast<double>(n)));
  }
  for (int64_t i = 0; i < n * d; ++i)
    smoothed_k[i] -= mean[i % d];
}

void HeadCopies::smooth_queries(const Head& head, bool smooth) {
  const int64_t m = head.queries, d = head.channels, unit = channel_tokens_q(spec_);
  smoothed_q_.assign(head.q, head.q + m * d);
  if (!smooth)
    return;
  for (int64_t first = 0; first < m; first += unit) {
    const int64_t count = std::min(unit, m - first);
    for (int64_t c = 0; c < d; ++c) {
      double sum = 0;
      for (int64_t i = first; i < first + count; ++i)
        sum += head.q[i * d + c];
      query_means_.push_back(static_cast<float>(sum / static_cast<double>(count)));
      for (int64_t i = first; i < first + count; ++i)
        smoothed_q_[i * d + c] -= query_means_.back();
    }
  }
}

/// Takes off the mean of one token in eight.
std::vector<float> HeadCopies::smoothed_values(const Head& head, bool smooth) {
  constexpr int64_t kStep = 8;
  const int64_t n = head.keys, d = head.channels;
  std::vector<float> values(head.v, head.v + n * d);
  v_mean.assign(d, 0);
  for (int64_t c = 0; smooth && n > 0 && c < d; ++c) {
    double sum = 0;
    for (int64_t token = 0; token < n; token += kStep)
      sum += head.v[token * d + c];
    const auto mean = static_cast<float>(sum / static_cast<double>((n + kStep - 1) / kStep));
    v_mean[c] = std::isfinite(mean) ? mean : 0;
    for (int64_t token = 0; token < n; ++token)
      values[token * d + c] -= v_mean[c];
  }
  return values;
}

const float* HeadCopies::query_mean(int64_t query) const {
  return query_means_.empty()
             ? nullptr
             : query_means_.data() + query / channel_tokens_q(spec_) * spec_.head_dim;
}

/// Brings rows of dO to one magnitude if one scale of dV serves many rows.
void HeadCopies::scale_douts(const Head& head, bool int8_dv) {
  const int64_t m = head.queries, d = head.channels;
  exponents.assign(m, 0);
  douts.assign(head.dout, head.dout + m * d);
  if (!int8_dv)
    return;
  if (!one_scale_)
    exponents = row_exponents(head.dout, m, d, channel_tokens_q(spec_));
  for (int64_t i = 0; i < m * d; ++i)
    douts[i] = std::ldexp(douts[i], -exponents[i / d]);
  dout_transposed = copy_by_channels(douts.data(), m, d, channel_tokens_q(spec_), one_scale_);
  for (float& x : douts)
    x = round_to(spec_.dtype, x);
}

std::vector<float> HeadCopies::without_sinks(const float* keys, int64_t count) const {
  std::vector<float> x(keys, keys + count * spec_.head_dim);
  std::fill_n(x.begin(), spec_.sink_keys * spec_.head_dim, 0.0f);
  return x;
}

std::vector<float> HeadCopies::rotated(const float* x, int64_t tokens) const {
  const int channels = spec_.head_dim;
  if (!spec_.rotate)
    return {x, x + tokens * channels};
  const int filled = std::max(width(spec_), channels);
  std::vector<float> result(tokens * filled);
  for (int64_t i = 0; i < tokens; ++i) {
    float* token = result.data() + i * filled;
    std::copy_n(x + i * channels, channels, token);
    rotate(token, filled);
  }
  return result;
}

} // namespace sagebwd::reference
