//===- exact.cpp - Attention in FP64 --------------------------------------===//
#include "runtime/reference/gemm.h"
#include "runtime/reference/head.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sagebwd::reference {
namespace {

constexpr double kEndless = std::numeric_limits<double>::infinity();

class ExactHead final : public HeadComputation<double> {
public:
  explicit ExactHead(const Head& head)
      : HeadComputation(head), head_(head), q_(head.q, head.q + head.queries * head.channels),
        k_(head.k, head.k + head.keys * head.channels),
        v_(head.v, head.v + head.keys * head.channels) {
    if (head.dout)
      dout_.assign(head.dout, head.dout + head.queries * head.channels);
    for (const auto* tensor : {&q_, &k_, &v_, &dout_})
      finite_ = finite_ && std::all_of(tensor->begin(), tensor->end(),
                                       [](double x) { return std::isfinite(x); });
  }

  Panel<double> panel(int64_t first, int64_t rows) override {
    Panel<double> out{first, rows};
    forward(out);
    if (head_.dout)
      backward(out);
    return out;
  }

private:
  MatrixView<double> rows_of(const std::vector<double>& tensor, int64_t first = 0) const {
    return {tensor.data() + first * head_.channels, head_.channels};
  }

  void forward(Panel<double>& out) {
    const int64_t n = head_.keys, d = head_.channels;
    out.p.resize(out.rows * n);
    out.o.resize(out.rows * d);
    out.lse.resize(out.rows);
    out.largest.resize(out.rows);
    slope_.assign(head_.score ? out.rows * n : 0, 0);
    gemm(out.rows, n, d, rows_of(q_, out.first), rows_of(k_).transposed(), out.p.data(), n);
    for (int64_t i = 0; i < out.rows; ++i) {
      double* p = out.p.data() + i * n;
      const VisibleKeys keys = head_.visible(out.first + i);
      const std::vector<double> scores(p, p + n);
      std::fill(p, p + n, 0.0);
      double maximum = -kEndless, sum = 0;
      for (int64_t j : keys) {
        p[j] = scores[j] * head_.softmax_scale;
        if (head_.score) {
          const Scored scored = head_.scored(out.first + i, j, p[j]);
          p[j] = scored.value, slope_[i * n + j] = scored.slope;
        }
        maximum = std::max(maximum, p[j]);
      }
      out.largest[i] = maximum;
      for (int64_t j : keys)
        sum += p[j] = std::exp(p[j] - maximum);
      for (int64_t j : keys)
        p[j] /= sum;
      out.lse[i] = keys.empty() ? -kEndless : maximum + std::log(sum);
    }
    sum_over_keys(out, out.p, v_, out.o);
  }

  /// o = matrix x, of x the keys that each query sees: a product has 0 NaN = NaN of the others.
  void sum_over_keys(const Panel<double>& out, const std::vector<double>& matrix,
                     const std::vector<double>& x, std::vector<double>& o) const {
    const int64_t n = head_.keys, d = head_.channels;
    if (finite_)
      return gemm(out.rows, d, n, {matrix.data(), n}, rows_of(x), o.data(), d);
    for (int64_t i = 0; i < out.rows; ++i)
      for (int64_t j : head_.visible(out.first + i))
        for (int64_t c = 0; c < d; ++c)
          o[i * d + c] += matrix[i * n + j] * x[j * d + c];
  }
  /// o += matrix^T x, of the queries that see each key.
  void sum_over_queries(const Panel<double>& out, const std::vector<double>& matrix,
                        const std::vector<double>& x, std::vector<double>& o) const {
    const int64_t n = head_.keys, d = head_.channels;
    if (finite_)
      return gemm(n, d, out.rows, MatrixView<double>{matrix.data(), n}.transposed(),
                  rows_of(x, out.first), o.data(), d, true);
    for (int64_t i = 0; i < out.rows; ++i)
      for (int64_t j : head_.visible(out.first + i))
        for (int64_t c = 0; c < d; ++c)
          o[j * d + c] += matrix[i * n + j] * x[(out.first + i) * d + c];
  }

  void backward(Panel<double>& out) {
    const int64_t n = head_.keys, d = head_.channels;
    out.dp.resize(out.rows * n);
    out.ds.resize(out.rows * n);
    out.delta.assign(out.rows, 0);
    const MatrixView<double> dout = rows_of(dout_, out.first);
    gemm(out.rows, n, d, dout, rows_of(v_).transposed(), out.dp.data(), n);
    for (int64_t i = 0; i < out.rows; ++i) {
      for (int64_t c = 0; c < d; ++c)
        out.delta[i] += dout.data[i * d + c] * out.o[i * d + c];
      out.delta[i] -= head_.dlse_of(out.first + i);
      for (int64_t j : head_.visible(out.first + i))
        out.ds[i * n + j] = out.p[i * n + j] * (out.dp[i * n + j] - out.delta[i]) *
                            (head_.score ? slope_[i * n + j] : 1);
    }
    sum_over_queries(out, out.p, dout_, dv);
    sum_over_queries(out, out.ds, q_, dk);
    out.dq.resize(out.rows * d);
    sum_over_keys(out, out.ds, k_, out.dq);
    for (double& x : out.dq)
      x *= head_.softmax_scale;
  }

  Head head_;
  std::vector<double> q_, k_, v_, dout_, slope_; ///< slope_: of the panel's score function
  bool finite_ = true;
};

} // namespace

std::unique_ptr<HeadComputation<double>> exact_head(const Head& head) {
  return std::make_unique<ExactHead>(head);
}

} // namespace sagebwd::reference
