//===- front.cpp - Norm and RoPE of queries and keys on the CPU -------------===//
#include "runtime/reference/front.h"

#include <algorithm>
#include <cmath>
#include <complex>

namespace sagebwd::reference {
namespace {

/// One token's vector of one head, and where its numbers lie.
class FrontVector {
public:
  FrontVector(const FrontInputs& in, int64_t b, int64_t h, int64_t t)
      : in_(in), row_((b * in.heads + h) * in.tokens + t), token_(b * in.tokens + t),
        gains_(in.gain.size() > size_t(in.head_dim) ? h * in.head_dim : 0) {}

  int64_t row() const { return row_; }
  size_t first() const { return size_t(row_ * in_.head_dim); }
  size_t place_of_gain(int channel) const { return size_t(gains_ + channel); }
  double x(int channel) const { return in_.x[first() + size_t(channel)]; }
  double gain(int channel) const { return in_.gain.empty() ? 1 : in_.gain[place_of_gain(channel)]; }

  /// What x is multiplied by before its gain.
  double factor() const {
    if (!in_.normed)
      return 1;
    if (!in_.inv_rms.empty()) {
      const bool of_heads = in_.inv_rms.size() > size_t(in_.batch * in_.tokens);
      return in_.inv_rms[size_t(of_heads ? row_ : token_)];
    }
    double sum = 0;
    for (int i = 0; i < in_.head_dim; ++i)
      sum += x(i) * x(i);
    return 1 / std::sqrt(sum / in_.head_dim + in_.eps);
  }

  /// Multiplies pairs, as complex numbers, by those of the table, or by their conjugates.
  void rotate(std::vector<double>& values, bool back) const {
    const int pairs = int(in_.cos.size() / size_t(in_.batch * in_.tokens));
    for (int i = 0; i < pairs; ++i) {
      double& a = values[size_t(in_.rope_begin + (in_.interleaved ? 2 * i : i))];
      double& b = values[size_t(in_.rope_begin + (in_.interleaved ? 2 * i + 1 : i + pairs))];
      const size_t place = size_t(token_ * pairs + i);
      const std::complex<double> angle(in_.cos[place], back ? -in_.sin[place] : in_.sin[place]);
      const std::complex<double> turned = std::complex<double>(a, b) * angle;
      a = turned.real(), b = turned.imag();
    }
  }

private:
  const FrontInputs& in_;
  int64_t row_, token_, gains_;
};

} // namespace

FrontOutputs exact_front(const FrontInputs& in) {
  const bool has_own_norm = in.normed && in.inv_rms.empty();
  FrontOutputs out;
  out.y.resize(in.x.size()), out.dx.resize(in.x.size()), out.dgain.resize(in.gain.size());
  std::vector<double> values(size_t(in.head_dim));
  for (int64_t b = 0; b < in.batch; ++b)
    for (int64_t h = 0; h < in.heads; ++h)
      for (int64_t t = 0; t < in.tokens; ++t) {
        const FrontVector vector(in, b, h, t);
        const double r = vector.factor();
        for (int i = 0; i < in.head_dim; ++i)
          values[size_t(i)] = vector.x(i) * r * vector.gain(i);
        vector.rotate(values, /*back=*/false);
        std::copy(values.begin(), values.end(), out.y.begin() + int64_t(vector.first()));

        for (int i = 0; i < in.head_dim; ++i)
          values[size_t(i)] = in.dy[vector.first() + size_t(i)];
        vector.rotate(values, /*back=*/true); // now the gradient of what is rotated
        double of_r = 0;
        for (int i = 0; i < in.head_dim; ++i) {
          if (!in.gain.empty())
            out.dgain[vector.place_of_gain(i)] += values[size_t(i)] * vector.x(i) * r;
          values[size_t(i)] *= vector.gain(i);
          of_r += values[size_t(i)] * vector.x(i);
        }
        if (!in.inv_rms.empty())
          out.dinv_rms.push_back(of_r);
        // r = (mean(x^2) + eps)^(-1/2), whose derivative is -r^3 x / D.
        const double through_r = has_own_norm ? -of_r * r * r * r / in.head_dim : 0;
        for (int i = 0; i < in.head_dim; ++i)
          out.dx[vector.first() + size_t(i)] = r * values[size_t(i)] + through_r * vector.x(i);
      }
  return out;
}

} // namespace sagebwd::reference
