//===- reference_exact_test.cpp - FP64 attention against its definition ----===//
#include "runtime/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

using namespace sagebwd;
using namespace sagebwd::reference;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_listed(const Inputs& in, const AttentionSpec& spec, int64_t head, int64_t i, int64_t j) {
  const int64_t rows = (in.problem.seq_q + spec.sparse_q - 1) / spec.sparse_q;
  const int64_t columns = (in.problem.seq_kv + spec.sparse_kv - 1) / spec.sparse_kv;
  return in.listed[(head * rows + i / spec.sparse_q) * columns + j / spec.sparse_kv] != 0;
}

/// Sums written out from the definition; shares no code with the library.
struct Naive {
  std::vector<double> o, lse;
  explicit Naive(const Inputs& in, const AttentionSpec& spec) {
    const Problem& p = in.problem;
    const Causal causal = spec.causal;
    const int64_t corner = causal == Causal::top_left ? 0 : p.seq_kv - p.seq_q;
    const int64_t d = in.head_dim;
    const double tau = in.softmax_scale ? *in.softmax_scale : 1 / std::sqrt(double(d));
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < p.seq_q; ++i) {
          const float* q = &in.q[((b * p.heads + h) * p.seq_q + i) * d];
          const int64_t kv = b * p.heads_kv + h * p.heads_kv / p.heads;
          double sum = 0;
          std::vector<double> row(d, 0);
          for (int64_t j = 0; j < p.seq_kv; ++j) {
            if ((spec.sparse_q > 0 && !is_listed(in, spec, b * p.heads + h, i, j)) ||
                (causal == Causal::top_left && j > i) ||
                (causal == Causal::bottom_right && j > i + p.seq_kv - p.seq_q) ||
                (spec.window_left >= 0 && j < i + corner - spec.window_left) ||
                (spec.window_right >= 0 && j > i + corner + spec.window_right))
              continue;
            double s = 0;
            for (int64_t c = 0; c < d; ++c)
              s += double(q[c]) * in.k[(kv * p.seq_kv + j) * d + c];
            const double e = std::exp(tau * s);
            sum += e;
            for (int64_t c = 0; c < d; ++c)
              row[c] += e * in.v[(kv * p.seq_kv + j) * d + c];
          }
          for (double x : row)
            o.push_back(sum == 0 ? 0 : x / sum);
          lse.push_back(std::log(sum));
        }
  }
  /// The function whose gradients the backward pass gives.
  static double loss(const Inputs& in, const AttentionSpec& spec) {
    const Naive forward(in, spec);
    double sum = 0;
    for (size_t i = 0; i < forward.o.size(); ++i)
      sum += forward.o[i] * in.dout[i];
    for (size_t i = 0; i < in.dlse.size(); ++i)
      sum += forward.lse[i] == -kInfinity ? 0 : forward.lse[i] * in.dlse[i]; // a constant
    return sum;
  }
};

struct Case {
  Problem problem;
  int head_dim;
  Causal causal;
  bool dlse = false;
  int window_left = kNoWindow, window_right = kNoWindow;
  int sparse_q = 0, sparse_kv = 0; ///< the sizes of blocks are any here
};

class ExactTest : public testing::TestWithParam<Case> {
protected:
  AttentionSpec mask() const {
    AttentionSpec spec;
    spec.causal = GetParam().causal;
    spec.window_left = GetParam().window_left, spec.window_right = GetParam().window_right;
    spec.sparse_q = GetParam().sparse_q, spec.sparse_kv = GetParam().sparse_kv;
    return spec;
  }
  Inputs inputs() const {
    Inputs in = random_inputs(GetParam().problem, GetParam().head_dim, DType::bf16, 1, 7);
    const Problem& p = in.problem;
    if (GetParam().dlse)
      in.dlse = random_inputs({p.batch, p.heads, p.heads, p.seq_q, 1}, 1, DType::bf16, 1, 8).q;
    if (GetParam().sparse_q > 0)
      in.listed = random_lists(mask(), p, 0.4, 10);
    return in;
  }
};

TEST_P(ExactTest, ForwardIsTheDefinition) {
  const Inputs in = inputs();
  const Outputs<double> out = exact(in, mask());
  const Naive naive(in, mask());
  for (size_t i = 0; i < naive.o.size(); ++i)
    EXPECT_NEAR(out.o[i], naive.o[i], 1e-6) << i; // the default scale is an FP32 number
  for (size_t i = 0; i < naive.lse.size(); ++i) {
    if (naive.lse[i] == -kInfinity)
      EXPECT_EQ(out.lse[i], -kInfinity) << i;
    else
      EXPECT_NEAR(out.lse[i], naive.lse[i], 1e-6) << i;
  }
}

TEST_P(ExactTest, GradientsAreDirectionalDerivatives) {
  const Inputs in = inputs();
  const Outputs<double> out = exact(in, mask());
  const Inputs direction = random_inputs(in.problem, in.head_dim, DType::bf16, 1, 9);
  const auto check = [&](std::vector<float> Inputs::*tensor, const std::vector<double>& gradient) {
    // Powers of two keep the steps exact in the float inputs.
    const float step = 0x1p-10f;
    double expected = 0;
    for (size_t i = 0; i < gradient.size(); ++i)
      expected += gradient[i] * (direction.*tensor)[i];
    Inputs up = in, down = in;
    for (size_t i = 0; i < gradient.size(); ++i) {
      (up.*tensor)[i] += step * (direction.*tensor)[i];
      (down.*tensor)[i] -= step * (direction.*tensor)[i];
    }
    const double measured = (Naive::loss(up, mask()) - Naive::loss(down, mask())) / (2 * step);
    EXPECT_NEAR(expected, measured, 1e-4 * (1 + std::abs(measured)));
  };
  check(&Inputs::q, out.dq);
  check(&Inputs::k, out.dk);
  check(&Inputs::v, out.dv);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ExactTest,
    testing::Values(Case{{1, 1, 1, 1, 1}, 16, Causal::none},
                    Case{{2, 4, 2, 9, 13}, 16, Causal::none},
                    Case{{1, 2, 1, 11, 11}, 8, Causal::top_left, true},
                    Case{{1, 2, 2, 7, 12}, 8, Causal::bottom_right, true},
                    Case{{1, 2, 2, 12, 70}, 8, Causal::top_left},
                    Case{{1, 3, 1, 70, 5}, 8, Causal::none, true},
                    Case{{1, 2, 1, 11, 11}, 8, Causal::none, true, 2, 3},
                    Case{{1, 2, 1, 9, 14}, 8, Causal::none, false, 0},
                    Case{{1, 2, 1, 14, 9}, 8, Causal::none, false, -1, 2},
                    Case{{1, 2, 1, 14, 9}, 8, Causal::top_left, false, 3},
                    Case{{1, 2, 2, 7, 12}, 8, Causal::bottom_right, true, 4, 1},
                    Case{{2, 2, 1, 17, 23}, 8, Causal::none, true, -1, -1, 4, 3},
                    Case{{1, 4, 2, 14, 20}, 8, Causal::bottom_right, true, -1, -1, 5, 2}));

TEST(Exact, ListsAreThoseOfTheSpec) {
  Inputs in = random_inputs({1, 2, 1, 12, 5}, 16, DType::bf16, 1, 3);
  AttentionSpec spec;
  spec.sparse_q = 4, spec.sparse_kv = 2;
  EXPECT_THROW(exact(in, spec), SpecError); // there are none
  in.listed.assign(2 * 3 * 3, 1);
  EXPECT_NO_THROW(exact(in, spec));
  EXPECT_THROW(exact(in, Causal::none), SpecError);
}

TEST(Exact, QueriesThatSeeNothingAreZero) {
  const Inputs in = random_inputs({1, 2, 1, 12, 5}, 16, DType::bf16, 1, 3);
  const Outputs<double> out = exact(in, Causal::bottom_right, true);
  const Naive naive(in, {.causal = Causal::bottom_right});
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 12; ++i) {
      const int64_t row = h * 12 + i;
      EXPECT_EQ(out.lse[row] == -kInfinity, i < 7);
      for (int64_t c = 0; c < 16; ++c) {
        EXPECT_NEAR(out.o[row * 16 + c], naive.o[row * 16 + c], 1e-6);
        if (i < 7) {
          EXPECT_EQ(out.dq[row * 16 + c], 0);
        }
      }
    }
  for (double x : out.dk)
    EXPECT_TRUE(std::isfinite(x));
}

TEST(Exact, NonFiniteInputsReachTheOutputs) {
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    for (auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
      Inputs in = random_inputs({1, 1, 1, 20, 20}, 16, DType::bf16, 1, 5);
      (in.*tensor)[3] = bad;
      const Outputs<double> out = exact(in, Causal::none);
      double sum = 0;
      for (auto* values : {&out.o, &out.dq, &out.dk, &out.dv})
        for (double x : *values)
          sum += x;
      EXPECT_FALSE(std::isfinite(sum));
    }
}

/// Inputs that a query does not see do not matter to it, and NaN is no exception.
TEST(Exact, NonFiniteInputsThatAreHiddenDoNotShow) {
  const int64_t n = 20, d = 16;
  for (const bool lists : {false, true}) {
    AttentionSpec mask;
    Inputs clean = random_inputs({1, 1, 1, n, n}, d, DType::bf16, 1, 5);
    if (lists) { // the second of two blocks of queries and of keys lists what the first does not
      mask.sparse_q = mask.sparse_kv = n / 2;
      clean.listed = {1, 0, 0, 1};
    } else {
      mask.causal = Causal::top_left;
    }
    const Outputs<double> expected = exact(clean, mask);
    for (const auto tensor : {&Inputs::k, &Inputs::v, &Inputs::q, &Inputs::dout}) {
      const bool of_key = tensor == &Inputs::k || tensor == &Inputs::v;
      Inputs in = clean;
      (in.*tensor)[(of_key ? n - 5 : 4) * d + 3] = NAN;
      const Outputs<double> out = exact(in, mask);
      // Queries before such a key, and keys behind such a query, have what they had.
      const int64_t first = of_key ? 0 : n / 2, count = n / 2;
      for (const auto output : of_key ? std::vector{&Outputs<double>::o, &Outputs<double>::dq}
                                      : std::vector{&Outputs<double>::dk, &Outputs<double>::dv})
        for (int64_t i = first * d; i < (first + count) * d; ++i)
          ASSERT_EQ((out.*output)[i], (expected.*output)[i]) << "element " << i;
      double sum = 0;
      for (const double x : out.dq)
        sum += x;
      EXPECT_FALSE(std::isfinite(sum)) << "it does not show where it is seen";
    }
  }
}

TEST(Exact, RefusesInputsOfOtherSizes) {
  Inputs in = random_inputs({1, 2, 1, 4, 4}, 16, DType::bf16, 1, 5);
  in.k.pop_back();
  EXPECT_THROW(exact(in, Causal::none), SpecError);
  Inputs heads = random_inputs({1, 3, 2, 4, 4}, 16, DType::bf16, 1, 5);
  EXPECT_THROW(exact(heads, Causal::none), SpecError);
}

} // namespace
