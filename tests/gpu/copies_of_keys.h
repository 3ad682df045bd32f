//===- copies_of_keys.h - What the pre-passes write of keys and values -----===//
#pragma once

#include "tests/gpu/copies_of_heads.h"

namespace sagebwd::test {

class CopiesOfKeys : public CopiesOfHeads {
public:
  using CopiesOfHeads::CopiesOfHeads;

protected:
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
    if (smooths_values())
      subtract_mean_of_values(v, head);
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
                       magnitude_of(in_.v, head, n), kChannelVectors + smooths_values());
    else if (int8_.dq)
      check_transposed(k, Operand::kt8, Operand::kt8_scale, head, unit,
                       magnitude_of(in_.k, head, n));
  }

  bool smooths_values() const { return s_.smooth_v && !backward_; }
  /// Takes the kernels' own mean off, once it is found right and the same in each unit.
  void subtract_mean_of_values(Matrix& v, int64_t head) const {
    const int64_t n = p_.seq_kv, units = ceil_div(padded(n), channel_tokens_kv(s_));
    for (int64_t c = 0; c < d_; ++c) {
      double sum = 0, size = 0;
      int count = 0;
      for (int64_t i = 0; i < n; i += 8, ++count) {
        sum += v[i * d_ + c];
        size += std::fabs(v[i * d_ + c]);
      }
      const auto mean = [&](int64_t unit) {
        return *at<float>(Operand::vt8_scale, ((head * units + unit) * 3 + 2) * d_ + slot(c));
      };
      near(mean(0), sum / count, 1e-6 * size / count + 1e-30, "mean of V", c);
      for (int64_t unit = 1; unit < units; ++unit)
        ASSERT_TRUE(same(mean(unit), mean(0))) << "channel " << c;
      for (int64_t i = 0; i < n; ++i)
        v[i * d_ + c] -= mean(0);
    }
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
};

} // namespace sagebwd::test
