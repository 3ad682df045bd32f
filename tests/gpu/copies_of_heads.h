//===- copies_of_heads.h - Copies of one head, whatever it holds -----------===//
//
// This file says where values lie in a copy, and what a copy has of a head's tokens, be they
// queries or keys.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/plan.h"
#include "runtime/reference/quantizer.h"
#include "tests/gpu/pre_pass_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace sagebwd::test {

class CopiesOfHeads {
public:
  explicit CopiesOfHeads(const PrePassRun& run)
      : run_(run), in_(filled(run.in)), s_(run.spec), p_(run.in.problem), d_(width(s_)),
        int8_(which_int8(s_.precision)), block_(grouping_of(s_.granularity).one_scale),
        backward_(run.pass == Pass::backward) {
    place_workspace(run.pass, run.spec, p_, 0, places_);
  }

protected:
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

  /// Tells where a byte of a row lies among images of tiles: 64 rows, in panels of at most 128
  /// bytes a row, whose 16-byte chunks are exchanged as shared memory wants them.
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
                        float magnitude, int64_t scale_vectors = kChannelVectors) const {
    const int64_t tokens = static_cast<int64_t>(x.size()) / d_, units = ceil_div(tokens, unit);
    const int8_t* bytes = at<int8_t>(copy, head * tokens * d_);
    const float* vectors = at<float>(scales, head * units * scale_vectors * d_);
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
        const float* own = vectors + u * scale_vectors * d_ + slot(c);
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

  const PrePassRun& run_;
  const reference::Inputs in_; ///< with the zeros that fill the kernels' width
  const AttentionSpec& s_;
  Problem p_;
  int64_t d_;
  Int8Products int8_;
  bool block_, backward_, half_dp_ = backward_ && sums_dp_in_fp16(s_);
  OperandValues places_{};
};

} // namespace sagebwd::test
