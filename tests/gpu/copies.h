//===- copies.h - What the pre-passes should have written ------------------===//
//
// Computed again from the tensors, value by value, in the words of templates/base.cuh. Integers,
// scales and 16-bit copies are compared bit for bit; what holds an FP32 sum, within a few roundings
// of its terms.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/reference/quantizer.h"
#include "runtime/reference/reference.h"
#include "tests/gpu/dout_exponents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace sagebwd::test {

/// A call's tensors, and its workspace behind the pre-passes.
struct PrePassRun {
  Pass pass;
  ResolvedSpec spec;
  reference::Inputs in; ///< softmax_scale set; dlse may be empty
  std::vector<float> out, lse;
  std::vector<std::byte> workspace;
};

class CopiesCheck {
public:
  explicit CopiesCheck(const PrePassRun& run)
      : run_(run), in_(filled(run.in)), s_(run.spec), p_(run.in.problem), d_(width(s_)),
        int8_(which_int8(s_.precision)), block_(grouping_of(s_.granularity).one_scale),
        backward_(run.pass == Pass::backward) {
    place_workspace(run.pass, run.spec, p_, 0, places_);
  }

  void expect_all() {
    for (int64_t head = 0; head < p_.batch * p_.heads_kv; ++head)
      check_keys(head);
    for (int64_t head = 0; head < p_.batch * p_.heads; ++head)
      check_queries(head);
  }

private:
  using Matrix = std::vector<float>; ///< padded tokens x channels

  std::vector<float> filled(const std::vector<float>& tensor) const {
    const int64_t channels = run_.spec->head_dim, all = width(run_.spec);
    std::vector<float> x(tensor.size() / channels * all);
    for (size_t i = 0; i < tensor.size(); ++i)
      x[i / channels * all + i % channels] = tensor[i];
    return x;
  }
  reference::Inputs filled(reference::Inputs in) const {
    for (std::vector<float>* tensor : {&in.q, &in.k, &in.v, &in.dout})
      *tensor = filled(*tensor);
    return in;
  }

  template <typename T> const T* at(Operand operand, int64_t index) const {
    return reinterpret_cast<const T*>(run_.workspace.data() + get(places_, operand)) + index;
  }
  static void near(double got, double expected, double tolerance, const char* what, int64_t i) {
    if (std::isinf(expected) || std::isinf(got))
      ASSERT_EQ(got, expected) << what << " of " << i;
    else
      ASSERT_NEAR(got, expected, tolerance) << what << " of " << i;
  }
  static bool same(float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
  }
  static int8_t level(float x, float inverse) {
    return static_cast<int8_t>(inverse == 0 ? 0 : std::nearbyint(x * inverse));
  }
  /// Slots 4t .. 4t + 3 of 16 hold tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  static int64_t slot(int64_t token) {
    return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2;
  }

  /// Where a byte of a row lies among images of tiles: 64 rows, in panels of at most 128 bytes a
  /// row, whose 16-byte chunks are exchanged as shared memory wants them.
  static int64_t place(int64_t row_bytes, int64_t row, int64_t byte) {
    const int64_t pitch = std::min<int64_t>(row_bytes, 128), panel = byte / pitch, r = row % 64;
    const int64_t chunk = byte % pitch / 16 ^ (row_bytes == 64 ? r / 2 % 4 : r % 8);
    return row / 64 * 64 * row_bytes + panel * 64 * pitch + r * pitch + chunk * 16 + byte % 16;
  }

  Matrix tokens_of(const std::vector<float>& tensor, int64_t head, int64_t tokens) const {
    Matrix x(padded(tokens) * d_, 0.0f);
    std::copy_n(tensor.begin() + head * tokens * d_, tokens * d_, x.begin());
    return x;
  }
  float largest(const Matrix& x, const auto& has) const {
    float largest = 0;
    for (size_t i = 0; i < x.size(); ++i)
      if (has(static_cast<int64_t>(i) / d_, static_cast<int64_t>(i) % d_))
        largest = std::max(largest, std::fabs(x[i]));
    return largest;
  }

  /// Rows for S, where group(token) says whose scale a token has: one scale a group.
  std::vector<float> check_rows(Matrix x, Operand copy, int64_t head, const auto& group) const {
    const int64_t tokens = static_cast<int64_t>(x.size()) / d_;
    if (s_.rotate)
      for (int64_t i = 0; i < tokens; ++i)
        reference::rotate(&x[i * d_], static_cast<int>(d_));
    std::vector<float> maxima(tokens, 0.0f), scales(tokens);
    for (int64_t i = 0; i < tokens * d_; ++i)
      maxima[group(i / d_)] = std::max(maxima[group(i / d_)], std::fabs(x[i]));
    const int8_t* got = at<int8_t>(copy, head * tokens * d_);
    int64_t wrong = 0;
    for (int64_t i = 0; i < tokens * d_; ++i) {
      const auto scale = reference::scale_of(maxima[group(i / d_)], reference::kSignedLevels);
      scales[i / d_] = scale.value;
      wrong += got[place(d_, i / d_, i % d_)] != level(x[i], scale.inverse);
    }
    EXPECT_EQ(wrong, 0) << name_of(copy) << " of head " << head;
    return scales;
  }

  /// The largest of every step-th of the head's tokens, at most 256 of them.
  float magnitude_of(const std::vector<float>& tensor, int64_t head, int64_t tokens) const {
    float largest = 0;
    for (int64_t i = 0; i < tokens; i += ceil_div(tokens, 256))
      for (int64_t c = 0; c < d_; ++c)
        largest = std::max(largest, std::fabs(tensor[(head * tokens + i) * d_ + c]));
    return largest == 0 ? 1 : largest;
  }

  void check_transposed(const Matrix& x, Operand copy, Operand scales, int64_t head, int64_t unit,
                        float magnitude) const {
    const int64_t tokens = static_cast<int64_t>(x.size()) / d_, units = ceil_div(tokens, unit);
    const int8_t* bytes = at<int8_t>(copy, head * tokens * d_);
    const float* vectors = at<float>(scales, head * units * kChannelVectors * d_);
    int64_t wrong = 0, wrong_scales = 0;
    for (int64_t u = 0; u < units; ++u) {
      std::vector<float> maxima(d_, 0.0f);
      for (int64_t i = u * unit * d_; i < std::min(tokens, (u + 1) * unit) * d_; ++i)
        maxima[i % d_] = std::max(maxima[i % d_], std::fabs(x[i]));
      if (block_)
        std::fill(maxima.begin(), maxima.end(), *std::max_element(maxima.begin(), maxima.end()));
      bool small = false; // otherwise the kernels do not ask for the head
      for (int64_t c = 0; c < run_.spec->head_dim; ++c)
        small |= maxima[c] < 0x1p-60f;
      const float beside = block_ ? 0 : (small ? magnitude : 1) * 0x1p-60f;
      const float least = std::max(beside, 0x1p-119f);
      for (int64_t c = 0; c < d_; ++c) {
        const bool zeros = maxima[c] < std::min(least, 0x1p-60f);
        const auto scale = reference::scale_of(maxima[c], reference::kSignedLevels);
        const float* own = vectors + u * kChannelVectors * d_ + slot(c);
        wrong_scales += !same(own[0], zeros ? least : scale.value);
        wrong_scales += !same(own[d_], zeros ? 1 / least : scale.inverse);
        for (int64_t i = u * unit; i < std::min(tokens, (u + 1) * unit); ++i)
          wrong += bytes[i / 64 * 64 * d_ + place(64, c, slot(i % 64))] !=
                   level(x[i * d_ + c], zeros ? 0 : scale.inverse);
      }
    }
    EXPECT_EQ(wrong, 0) << name_of(copy) << " of head " << head;
    EXPECT_EQ(wrong_scales, 0) << name_of(scales) << " of head " << head;
  }

  bool has_mean() const { return s_.smooth_k && (backward_ || int8_.s); }
  /// The kernels' own, once it is found right: what is smoothed depends on its last bit.
  float mean(int64_t head, int64_t c) const {
    return has_mean() ? *at<float>(Operand::k_mean, head * d_ + c) : 0;
  }

  void check_keys(int64_t head) const {
    const int64_t n = p_.seq_kv;
    Matrix k = tokens_of(in_.k, head, n), v = tokens_of(in_.v, head, n);
    if (has_mean())
      for (int64_t c = 0; c < d_; ++c) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < n; ++i) {
          sum += k[i * d_ + c];
          size += std::fabs(k[i * d_ + c]);
        }
        near(mean(head, c), sum / n, 1e-6 * size / n + 1e-30, "mean", c);
        for (int64_t i = 0; i < n; ++i)
          k[i * d_ + c] -= mean(head, c);
      }
    if (s_.sink_keys) {
      std::fill_n(k.begin(), d_, 0.0f);
      std::fill_n(v.begin(), d_, 0.0f);
    }
    if (int8_.s) {
      const auto scales = check_rows(k, Operand::k8, head, [&](int64_t key) {
        return block_ ? key / s_.group_kv : key / 32 * 4 + key / 2 % 4;
      });
      const float* got = at<float>(Operand::k8_scale, head * padded(n) / kKeysAScale);
      for (int64_t key = 0; key < padded(n); ++key)
        ASSERT_TRUE(same(got[key / 128 * 16 + key / 2 % 4 * 4 + key / 32 % 4], scales[key]))
            << "scale of key " << key;
    }
    const int64_t unit = channel_tokens_kv(s_);
    if (!backward_)
      check_transposed(v, Operand::vt8, Operand::vt8_scale, head, unit,
                       magnitude_of(in_.v, head, n));
    else if (int8_.dq)
      check_transposed(k, Operand::kt8, Operand::kt8_scale, head, unit,
                       magnitude_of(in_.k, head, n));
  }

  /// Means of units, and their scores. Gives queries less the kernels' own means.
  Matrix check_query_means(Matrix q, int64_t head, int64_t key_head) const {
    const int64_t m = p_.seq_q, n = p_.seq_kv, unit = channel_tokens_q(s_);
    const int64_t units = ceil_div(padded(m), unit);
    const Matrix k = tokens_of(in_.k, key_head, n);
    const double log2_tau = *run_.in.softmax_scale * 1.4426950408889634;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t first = u * unit, end = std::min(first + unit, m);
      const float* means = at<float>(Operand::q_mean, (head * units + u) * d_);
      for (int64_t c = 0; c < d_; ++c) {
        double sum = 0, size = 0;
        for (int64_t i = first; i < end; ++i) {
          sum += q[i * d_ + c];
          size += std::fabs(q[i * d_ + c]);
        }
        near(means[c], sum / (end - first), 1e-6 * size / (end - first) + 1e-30, "mean of q", c);
        for (int64_t i = first; i < end; ++i)
          q[i * d_ + c] -= means[c];
      }
      const float* scores = at<float>(Operand::mean_scores, (head * units + u) * padded(n));
      for (int64_t key = 0; key < padded(n); ++key) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < d_ && key >= s_.sink_keys && key < n; ++c) {
          const double term = means[c] * (k[key * d_ + c] - mean(key_head, c)) * log2_tau;
          sum += term;
          size += std::fabs(term);
        }
        near(scores[key], sum, 2e-6 * size, "score of a mean with key", key);
      }
    }
    return q;
  }

  /// The last two copies of keys: what is taken off a head's values, in the kernels' order, from
  /// sums of chunks that are found right; and the values less that, in FP16.
  struct HalfValues {
    std::vector<float> centre;
    float inverse; ///< of the power of two
  };
  /// A power of two that brings `largest` below 2^exponent.
  static int power_below(int exponent, float largest) {
    int above = -126;
    if (largest >= 0x1p-126f)
      std::frexp(largest, &above);
    return std::clamp(exponent - above, -126, 126);
  }
  HalfValues half_values_of(int64_t head) const {
    const int64_t n = p_.seq_kv, chunks = mean_chunks(n), parts = 256 / d_;
    const int64_t share = std::max<int64_t>(256, ceil_div(ceil_div(n, 16), 64) * 64);
    HalfValues values{std::vector<float>(d_), 0};
    float largest = 0;
    for (int64_t c = 0; c < d_; ++c) {
      const auto range = [&](int64_t chunk, int vector) {
        return *at<float>(Operand::value_range, ((head * chunks + chunk) * 3 + vector) * d_ + c);
      };
      std::vector<float> of_part(parts, 0.0f);
      float highest = -INFINITY, lowest = -INFINITY;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        double sum = 0, size = 0;
        for (int64_t i = chunk * share; i < std::min(n, (chunk + 1) * share); ++i) {
          const float x = in_.v[(head * n + i) * d_ + c];
          sum += x;
          size += std::fabs(x);
          highest = std::max(highest, x), lowest = std::max(lowest, -x);
        }
        near(range(chunk, 0), sum, 1e-6 * size, "sum of values", c);
        of_part[chunk % parts] += range(chunk, 0);
      }
      float sum = 0;
      for (float part : of_part)
        sum += part;
      values.centre[c] = sum / static_cast<float>(n);
      largest = std::max({largest, highest - values.centre[c], lowest + values.centre[c]});
    }
    const int power = power_below(9, largest);
    values.inverse = std::ldexp(1.0f, -power);
    const uint16_t* got = at<uint16_t>(Operand::half_v, head * padded(n) * d_);
    int64_t wrong = 0;
    for (int64_t i = 0; i < padded(n) * d_; ++i) {
      const float x = i < n * d_ ? in_.v[head * n * d_ + i] - values.centre[i % d_] : 0;
      wrong += got[place(2 * d_, i / d_, 2 * (i % d_)) / 2] !=
               reference::encode(DType::fp16, std::ldexp(x, power));
    }
    EXPECT_EQ(wrong, 0) << "half_v of head " << head;
    return values;
  }
  /// dO in FP16, and the factors of its rows, which are dP's and 2^-exponent.
  void check_half_douts(const Matrix& dout, const std::vector<int>& exponents, float of_values,
                        int64_t head) const {
    const int64_t tokens = static_cast<int64_t>(dout.size()) / d_;
    const uint16_t* got = at<uint16_t>(Operand::half_dout, head * tokens * d_);
    int64_t wrong = 0, wrong_factors = 0;
    for (int64_t i = 0; i < tokens; ++i) {
      float largest = 0;
      for (int64_t c = 0; c < d_; ++c)
        largest = std::max(largest, std::fabs(dout[i * d_ + c]));
      const int power = power_below(-4, largest);
      for (int64_t c = 0; c < d_; ++c)
        wrong += got[place(2 * d_, i, 2 * c) / 2] !=
                 reference::encode(DType::fp16, std::ldexp(dout[i * d_ + c], power));
      const float factor = std::ldexp(1.0f, -power) * std::ldexp(1.0f, -exponents[i]) * of_values;
      wrong_factors +=
          !same(*at<float>(Operand::dp_factor, head * tokens + i / 64 * 64 + slot(i % 64)), factor);
    }
    EXPECT_EQ(wrong, 0) << "half_dout of head " << head;
    EXPECT_EQ(wrong_factors, 0) << "dp_factor of head " << head;
  }

  void check_queries(int64_t head) const {
    const int64_t m = p_.seq_q, tokens = padded(m), unit = channel_tokens_q(s_);
    const int64_t key_head = head / (p_.heads / p_.heads_kv); // of all batches' alike
    const Matrix q = tokens_of(in_.q, head, m);
    const Matrix smoothed = s_.smooth_q ? check_query_means(q, head, key_head) : q;
    std::vector<float> scales(tokens, 1.0f);
    if (int8_.s)
      scales = check_rows(smoothed, Operand::q8, head,
                          [&](int64_t i) { return block_ ? i / s_.group_q : i; });
    const bool shifted = s_.smooth_k && int8_.s;
    std::vector<double> shift_of(d_), first_key(d_), first_value(d_);
    for (int64_t c = 0; c < d_; ++c) {
      shift_of[c] = shifted ? mean(key_head, c) : 0;
      first_key[c] = in_.k[key_head * p_.seq_kv * d_ + c] - shift_of[c];
      first_value[c] = in_.v[key_head * p_.seq_kv * d_ + c];
    }
    Matrix dout, out;
    if (backward_) {
      dout = tokens_of(in_.dout, head, m);
      out = tokens_of(filled(run_.out), head, m);
    }
    const float tau = *run_.in.softmax_scale, log2_tau = tau * 1.44269504f;
    std::vector<double> dk(ceil_div(tokens, unit) * d_), dv(dk), dk_size(dk), dv_size(dk);
    const std::vector<int> exponents = backward_ && scales_dout(s_)
                                           ? exponents_of(dout, tokens, d_, unit, m)
                                           : std::vector<int>(tokens, 0);
    std::vector<float> centre(d_, 0.0f);
    if (half_dp_) {
      const HalfValues values = half_values_of(key_head);
      centre = values.centre;
      check_half_douts(dout, exponents, values.inverse, head);
    }
    for (int64_t i = 0; i < tokens; ++i) {
      const auto row = [&](int vector) {
        return *at<float>(Operand::q_rows,
                          ((head * tokens + i) / 64 * kRowVectors + vector) * 64 + slot(i % 64));
      };
      ASSERT_TRUE(same(row(0), scales[i] * log2_tau)) << "scale of query " << i;
      const auto dot = [&](const Matrix& x, const auto& y, double& size) {
        double sum = 0;
        for (int64_t c = 0; c < d_; ++c) {
          sum += static_cast<double>(x[i * d_ + c]) * y[c];
          size += std::fabs(static_cast<double>(x[i * d_ + c]) * y[c]);
        }
        return sum;
      };
      constexpr double kSum = 1e-6; // of a sum's terms
      double shift_size = 0, score_size = 0;
      const double shift = dot(q, shift_of, shift_size) * tau;
      const double score = dot(q, first_key, score_size) * log2_tau;
      const double shift_error = kSum * shift_size * tau + 1e-6 * std::fabs(shift);
      const double score_error = kSum * score_size * log2_tau;
      if (!backward_) {
        near(row(1), shift, shift_error, "shift", i);
        if (s_.sink_keys)
          near(row(3), score, score_error, "score of key 0", i);
        continue;
      }
      const float lse = i < m ? run_.lse[head * m + i] : -std::numeric_limits<float>::infinity();
      const double log2_lse = std::isinf(lse) ? INFINITY : (lse - shift) * 1.4426950408889634;
      const int exponent = exponents[i];
      const double lse_error =
          2 * (shift_error + 1e-6 * (std::fabs(shift) + (std::isinf(lse) ? 0 : std::fabs(lse))));
      near(row(1), log2_lse - exponent, lse_error + 1e-6 * std::abs(exponent), "lse", i);

      double delta_size = 0, value_size = 0;
      const double product = dot(dout, std::span(out).subspan(i * d_, d_), delta_size);
      const double dlse = i < m && !run_.in.dlse.empty() ? run_.in.dlse[head * m + i] : 0;
      const double minus_delta = dlse - product;
      const double delta_error = kSum * (delta_size + std::fabs(dlse));
      double centre_size = 0;
      const double start = minus_delta + dot(dout, centre, centre_size);
      near(row(2), std::ldexp(start, -exponent),
           std::ldexp(delta_error + kSum * centre_size, -exponent), "delta", i);
      if (s_.sink_keys) {
        const double probability = std::exp2(score - log2_lse);
        const double ds = probability * (dot(dout, first_value, value_size) + minus_delta);
        const double relative = score_error + lse_error + 1e-5;
        near(row(3), ds,
             relative * std::fabs(ds) + probability * (delta_error + kSum * value_size) + 1e-30,
             "dS of key 0", i);
        for (int64_t c = 0; c < d_; ++c) {
          const int64_t sum = i / unit * d_ + c;
          const double of_k = static_cast<double>(row(3)) * q[i * d_ + c];
          const double of_v = probability * dout[i * d_ + c];
          dk[sum] += of_k;
          dv[sum] += of_v;
          dk_size[sum] += std::fabs(of_k) * 2e-6;
          dv_size[sum] += std::fabs(of_v) * (2e-6 + relative);
        }
      }
      for (int64_t c = 0; c < d_; ++c)
        dout[i * d_ + c] = std::ldexp(dout[i * d_ + c], -exponent);
    }
    if (!backward_)
      return;
    if (s_.sink_keys)
      for (size_t i = 0; i < dk.size(); ++i) {
        const int64_t part = static_cast<int64_t>(i) / d_, c = static_cast<int64_t>(i) % d_;
        const float* sums =
            at<float>(Operand::sink_partial,
                      (head * static_cast<int64_t>(dk.size()) / d_ + part) * 2 * d_ + c);
        near(sums[0], dk[i], dk_size[i] + 1e-30, "sum of dK of key 0", c);
        near(sums[d_], dv[i], dv_size[i] + 1e-30, "sum of dV of key 0", c);
      }
    if (scales_dout(s_) && !half_dp_) {
      const uint16_t* got = at<uint16_t>(Operand::dout_rows, head * tokens * d_);
      int64_t wrong = 0;
      for (int64_t i = 0; i < tokens * d_; ++i)
        wrong +=
            got[place(2 * d_, i / d_, 2 * (i % d_)) / 2] != reference::encode(s_.dtype, dout[i]);
      EXPECT_EQ(wrong, 0) << "dout_rows of head " << head;
    }
    if (int8_.dk)
      check_transposed(smoothed, Operand::qt8, Operand::qt8_scale, head, unit,
                       magnitude_of(in_.q, head, m));
    if (int8_.dv) // whose rows are of one magnitude
      check_transposed(dout, Operand::dot8, Operand::dot8_scale, head, unit, 1);
  }

  const PrePassRun& run_;
  const reference::Inputs in_; ///< with the zeros that fill the kernels' width
  const AttentionSpec& s_;
  Problem p_;
  int64_t d_;
  Int8Products int8_;
  bool block_, backward_, half_dp_ = backward_ && sums_dp_in_fp16(s_);
  OperandValues places_{};
};

/// Inputs whose rows and channels differ in size, some of them zeros, with an out and an lse that
/// go with nothing.
inline PrePassRun pre_pass_run(Pass pass, const AttentionSpec& spec, const Problem& p) {
  PrePassRun run{pass, resolved(spec), {}, {}, {}, {}};
  reference::Inputs& in = run.in;
  const DType dtype = spec.dtype;
  in = reference::random_inputs(p, spec.head_dim, dtype, 1, 11);
  in.softmax_scale = 1 / std::sqrt(static_cast<float>(spec.head_dim));
  const int64_t d = spec.head_dim;
  run.out = reference::random_inputs(p, spec.head_dim, dtype, 0.5, 12).q;
  for (std::vector<float>* tensor : {&in.q, &in.k, &in.v, &in.dout})
    for (size_t i = 0; i < tensor->size(); ++i) {
      const int64_t token = static_cast<int64_t>(i) / d, channel = static_cast<int64_t>(i) % d;
      float& x = (*tensor)[i];
      if (tensor == &in.dout)
        x = std::ldexp(x, static_cast<int>(token * 7 % 13) - 8);
      if (channel % 16 == 3)
        x = x * 4 + (tensor == &in.k ? 2 : 0);
      if (token % 67 == 5 || channel == 17 ||
          token / channel_tokens_q(run.spec) == 1 && channel == 20)
        x = 0;
      x = reference::round_to(dtype, x);
    }
  run.lse.resize(p.batch * p.heads * p.seq_q);
  in.dlse.resize(run.lse.size());
  for (size_t i = 0; i < run.lse.size(); ++i) {
    run.lse[i] = i % 31 == 2 ? -INFINITY : 3 + std::sin(static_cast<float>(i));
    in.dlse[i] = std::cos(static_cast<float>(i) * 1.3f);
  }
  return run;
}

} // namespace sagebwd::test
