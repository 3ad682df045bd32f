//===- copies.h - What the pre-passes should have written ------------------===//
//
// Computed again from the tensors, value by value, in the words of templates/base.cuh. Integers,
// scales and 16-bit copies are compared bit for bit; what holds an FP32 sum, within a few roundings
// of its terms.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tests/gpu/copies_of_keys.h"
#include "tests/gpu/dout_exponents.h"

#include <limits>
#include <span>

namespace sagebwd::test {

class CopiesCheck : CopiesOfKeys {
public:
  using CopiesOfKeys::CopiesOfKeys;

  void expect_all() {
    for (int64_t head = 0; head < p_.batch * p_.heads_kv; ++head)
      check_keys(head);
    for (int64_t head = 0; head < p_.batch * p_.heads; ++head)
      check_queries(head);
  }

private:
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
};

} // namespace sagebwd::test
