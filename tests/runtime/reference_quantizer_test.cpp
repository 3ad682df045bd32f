//===- reference_quantizer_test.cpp - psi, rotation, rounding, products ----===//
#include "runtime/reference/copies.h"
#include "runtime/reference/gemm.h"
#include "runtime/reference/quantizer.h"
#include "runtime/reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

using namespace sagebwd;
using namespace sagebwd::reference;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();

TEST(Quantizer, RoundsHalfToEven) {
  const std::vector<float> x = {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f, -126.5f};
  const Quantized q = quantize(x.data(), 1, 9, 9, Sharing::row, kSignedLevels);
  EXPECT_EQ(q.levels, (std::vector<float>{127, 0, 2, 2, 0, -2, -2, 126, -126}));
  EXPECT_EQ(q.row_scale[0], 127 * (1.0f / 127));
}

TEST(Quantizer, UnsignedUsesAllLevels) {
  const std::vector<float> x = {1, 0.5f, 0, 0.001f};
  const Quantized q = quantize(x.data(), 1, 4, 4, Sharing::row, kUnsignedLevels);
  EXPECT_EQ(q.levels, (std::vector<float>{255, 128, 0, 0}));
}

TEST(Quantizer, ScaleBelongsToWhatSharesIt) {
  const std::vector<float> x = {1, 2, 3, 40};
  const Quantized rows = quantize(x.data(), 2, 2, 2, Sharing::row, kSignedLevels);
  EXPECT_EQ(rows.row_scale, (std::vector<float>{2 * (1.0f / 127), 40 * (1.0f / 127)}));
  EXPECT_EQ(rows.column_scale, (std::vector<float>{1, 1}));
  const Quantized columns = quantize(x.data(), 2, 2, 2, Sharing::column, kSignedLevels);
  EXPECT_EQ(columns.column_scale, (std::vector<float>{3 * (1.0f / 127), 40 * (1.0f / 127)}));
  EXPECT_EQ(columns.levels, (std::vector<float>{42, 6, 127, 127}));
  const Quantized whole = quantize(x.data(), 2, 2, 2, Sharing::whole, kSignedLevels);
  EXPECT_EQ(whole.row_scale, (std::vector<float>(2, 40 * (1.0f / 127))));
  EXPECT_EQ(whole.levels, (std::vector<float>{3, 6, 10, 127}));
}

TEST(Quantizer, TinyGroupsAreZero) {
  for (float maximum : {0.0f, 0x1p-149f, 0x1.fffffep-120f}) {
    const Quantized q = quantize(&maximum, 1, 1, 1, Sharing::row, kSignedLevels);
    EXPECT_EQ(q.levels[0], 0);
    EXPECT_EQ(q.row_scale[0], 0);
  }
  const float smallest = 0x1p-119f;
  EXPECT_EQ(quantize(&smallest, 1, 1, 1, Sharing::row, kSignedLevels).levels[0], 127);
}

TEST(Quantizer, NonFiniteGroupsStayNonFinite) {
  for (float bad : {kNan, -kNan, kInfinite, -kInfinite})
    for (size_t position : {0, 1, 2}) {
      std::vector<float> x = {1, 5, 2};
      x[position] = bad;
      const Quantized q = quantize(x.data(), 1, 3, 3, Sharing::whole, kSignedLevels);
      EXPECT_TRUE(std::isnan(q.row_scale[0]));
      EXPECT_EQ(q.levels, (std::vector<float>{0, 0, 0}));
    }
}

TEST(Copies, EightKeysShareAScale) {
  std::vector<float> x(70);
  for (size_t key = 0; key < x.size(); ++key)
    x[key] = static_cast<float>(key + 1);
  const Copy copy = copy_by_key_octets(x.data(), 70, 1);
  const auto largest_of = [&](int key) { // of the lane's last pair among what is there
    const int last = key / 32 * 32 + 25 + key / 2 % 4 * 2;
    return x[last < 70 ? last : key / 2 % 4 * 2 + 65];
  };
  for (int key = 0; key < 70; ++key) {
    const float largest = largest_of(key);
    EXPECT_EQ(copy.token_scale[key], largest * (1.0f / 127)) << key;
    EXPECT_EQ(copy.levels[key], std::nearbyint(x[key] * (127 / largest))) << key;
  }
}

TEST(Copies, AChannelHasAScaleInEachUnit) {
  // Two channels, units of 3 tokens, the second one short.
  const std::vector<float> x = {1, 0x1p-61f, -4, 0, 2, -0x1p-61f, 8, 5};
  const Copy copy = copy_by_channels(x.data(), 4, 2, 3, false);
  EXPECT_EQ(copy.levels, (std::vector<float>{32, 0, -127, 0, 64, 0, 127, 127}));
  EXPECT_EQ(copy.scales_at(2)[0], 4 * (1.0f / 127));
  EXPECT_EQ(copy.scales_at(3)[1], 5 * (1.0f / 127));
  const Copy whole = copy_by_channels(x.data(), 4, 2, 3, true);
  EXPECT_EQ(whole.scales_at(3)[1], 8 * (1.0f / 127));
}

TEST(Copies, AChannelIsSmallBesideItsHead) {
  const std::vector<float> x = {1, 0x1p-61f, -4, 0, 2, -0x1p-61f};
  const auto levels = [&](float magnitude) {
    return copy_by_channels(x.data(), 3, 2, 3, false, magnitude).levels;
  };
  const std::vector<float> zeros = {32, 0, -127, 0, 64, 0}, kept = {32, 127, -127, 0, 64, -127};
  EXPECT_EQ(levels(0.5f), kept);
  EXPECT_EQ(levels(0x1.8p-1f), zeros);
  EXPECT_EQ(levels(0x1p100f), zeros);
  // And nothing is below 2^-119, whatever the head.
  const float least = 0x1p-119f, less = 0x1.fep-120f;
  EXPECT_EQ(copy_by_channels(&least, 1, 1, 1, false, 0x1p-110f).levels[0], 127);
  EXPECT_EQ(copy_by_channels(&less, 1, 1, 1, false, 0x1p-110f).levels[0], 0);
}

TEST(Copies, SomeTokensTellTheMagnitudeOfAHead) {
  std::vector<float> x(2 * 700, 0);
  EXPECT_EQ(sampled_magnitude(x.data(), 700, 2), 1); // nothing
  x[0] = -0x1p-50f, x[2 * 4] = 3;                    // every third is looked at
  EXPECT_EQ(sampled_magnitude(x.data(), 700, 2), 0x1p-50f);
  EXPECT_EQ(sampled_magnitude(x.data(), 256, 2), 3);
  x[2 * 699 + 1] = -5;
  EXPECT_EQ(sampled_magnitude(x.data(), 700, 2), 5);
  x[2 * 3] = kInfinite;
  EXPECT_EQ(sampled_magnitude(x.data(), 700, 2), 1);
}

TEST(Copies, RowsOfLikeMagnitudeHaveOneExponent) {
  // Both sides of a power of two, a far row, nothing, what is no number, and a second unit.
  const std::vector<float> x = {1.9f, 2.1f, 1.9f, -2.1f, 2.1f, 32, 0, kNan, kInfinite, 0x1p-118f};
  EXPECT_EQ(row_exponents(x.data(), 5, 1, 5), std::vector<int>(5, 0));
  EXPECT_EQ(row_exponents(x.data(), 9, 1, 9), (std::vector<int>{0, 0, 0, 0, 0, 4, 1, 1, 1}));
  // A row of zeros, or with NaN or Inf, goes with the others, if there are any.
  const std::vector<float> small = {0, 0x1p-20f, kNan, 0, 0};
  EXPECT_EQ(row_exponents(small.data(), 5, 1, 3), (std::vector<int>{-20, -20, -20, 0, 0}));
  // A unit of nothing goes with the head, if that is finite.
  const std::vector<float> ends = {0, 0x1p-20f, 0, 0, 0};
  EXPECT_EQ(row_exponents(ends.data(), 5, 1, 3), std::vector<int>(5, -20));
  EXPECT_EQ(row_exponents(x.data(), 10, 1, 9)[9], -100);
  EXPECT_EQ(row_exponents(x.data(), 6, 1, 5)[5], 5);
}

TEST(Rotation, IsTheSylvesterHadamardMatrixBehindSigns) {
  constexpr int kNegated[] = {3, 11, 24, 36, 63, 127, 192};
  for (int channels : {16, 64, 128, 256}) {
    for (int column : {0, 1, 3, 5, 11, 24, 27, 36, 39, 63, 103, 127, 192, 255}) {
      if (column >= channels)
        continue;
      std::vector<float> x(channels, 0);
      x[column] = 1;
      rotate(x.data(), channels);
      const bool negated =
          std::find(std::begin(kNegated), std::end(kNegated), column) != std::end(kNegated);
      for (int row = 0; row < channels; ++row) {
        const double sign = (__builtin_popcount(row & column) % 2 != 0) != negated ? -1 : 1;
        EXPECT_FLOAT_EQ(x[row], sign / std::sqrt(double(channels)));
      }
    }
  }
}

TEST(Rotation, SpreadsWhatAllChannelsHaveInCommon) {
  // Any row of the matrix, that of ones among them: of an even power of two they become flat.
  for (const auto& [channels, largest] : {std::pair(64, 1.0), {128, std::sqrt(2)}, {256, 1.0}})
    for (int row = 0; row < channels; ++row) {
      std::vector<float> x(channels);
      for (int c = 0; c < channels; ++c)
        x[c] = __builtin_popcount(row & c) % 2 ? -1 : 1;
      rotate(x.data(), channels);
      for (float value : x)
        ASSERT_LE(std::fabs(value), largest * (1 + 1e-6)) << channels << " channels, row " << row;
    }
}

TEST(Rotation, KeepsInnerProductsInBlocksOfAPowerOfTwo) {
  for (int channels : {48, 96, 128}) {
    const Inputs in = random_inputs({1, 1, 1, 1, 1}, channels, DType::bf16, 1, 11);
    std::vector<float> a = in.q, b = in.k;
    double before = 0, after = 0;
    for (int i = 0; i < channels; ++i)
      before += double(a[i]) * b[i];
    rotate(a.data(), channels);
    rotate(b.data(), channels);
    for (int i = 0; i < channels; ++i)
      after += double(a[i]) * b[i];
    EXPECT_NEAR(before, after, 1e-4);
    EXPECT_NE(a, in.q);
  }
}

TEST(Rounding, EveryHalfSurvives) {
  for (DType dtype : {DType::bf16, DType::fp16})
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float x = decode(dtype, static_cast<uint16_t>(bits));
      if (std::isnan(x))
        ASSERT_TRUE(std::isnan(round_to(dtype, x)));
      else
        ASSERT_EQ(encode(dtype, x), bits);
    }
}

TEST(Rounding, TiesGoToTheEvenNeighbour) {
  for (DType dtype : {DType::bf16, DType::fp16}) {
    const uint16_t infinity = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
    for (uint16_t low = 0; low + 1 < infinity; ++low) {
      const float a = decode(dtype, low), b = decode(dtype, static_cast<uint16_t>(low + 1));
      const float middle = a + (b - a) / 2;
      ASSERT_EQ(encode(dtype, middle), low % 2 ? low + 1 : low);
      ASSERT_EQ(encode(dtype, std::nextafter(middle, kInfinite)), low + 1);
      ASSERT_EQ(encode(dtype, std::nextafter(middle, 0.0f)), low);
    }
  }
  EXPECT_EQ(round_to(DType::fp16, 65519.996f), 65504);
  EXPECT_EQ(round_to(DType::fp16, 65520), kInfinite);
  EXPECT_EQ(round_to(DType::fp16, -70000), -kInfinite);
}

TEST(Random, IsNormalReproducibleAndRounded) {
  const Inputs a = random_inputs({1, 4, 2, 100, 50}, 64, DType::bf16, 3, 1);
  EXPECT_EQ(a.q, random_inputs({1, 4, 2, 100, 50}, 64, DType::bf16, 3, 1).q);
  EXPECT_NE(a.q, random_inputs({1, 4, 2, 100, 50}, 64, DType::bf16, 3, 2).q);
  EXPECT_NE(a.k, a.v);
  EXPECT_EQ(a.k.size(), 2u * 50 * 64);
  const auto moments = [](const std::vector<float>& x) {
    double mean = 0, square = 0;
    for (float value : x) {
      mean += value / x.size();
      square += double(value) * value / x.size();
    }
    return std::pair(mean, std::sqrt(square));
  };
  EXPECT_NEAR(moments(a.q).first, 0, 0.07);
  EXPECT_NEAR(moments(a.q).second, 3, 0.06);
  EXPECT_NEAR(moments(a.dout).second, 1, 0.02);
  for (float x : a.q)
    EXPECT_EQ(x, round_to(DType::bf16, x));
  EXPECT_GT(std::set<float>(a.q.begin(), a.q.end()).size(), 500u);
}

template <typename T> void check_gemm() {
  for (auto [m, n, k] :
       {std::array<int64_t, 3>{1, 1, 1}, {7, 33, 5}, {64, 128, 64}, {13, 17, 600}}) {
    std::vector<T> a(m * k), b(k * n), c(m * n, 3);
    for (size_t i = 0; i < a.size(); ++i)
      a[i] = static_cast<T>(int(i * 37 % 256));
    for (size_t i = 0; i < b.size(); ++i)
      b[i] = static_cast<T>(int(i * 91 % 255) - 127);
    std::vector<int64_t> expected(m * n, 0);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j)
        for (int64_t l = 0; l < k; ++l)
          expected[i * n + j] += int64_t(a[i * k + l]) * int64_t(b[l * n + j]);
    const MatrixView<T> view_a{a.data(), k}, view_b{b.data(), n};
    gemm(m, n, k, view_a, view_b, c.data(), n);
    for (int64_t i = 0; i < m * n; ++i)
      ASSERT_EQ(c[i], expected[i]);
    std::vector<T> transposed(n * m, 1);
    gemm(n, m, k, view_b.transposed(), view_a.transposed(), transposed.data(), m, true);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j)
        ASSERT_EQ(transposed[j * m + i], expected[i * n + j] + 1);
  }
}
TEST(Gemm, IntegersAreExact) {
  check_gemm<float>();
  check_gemm<double>();
}

} // namespace
