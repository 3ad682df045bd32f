//===- half_sums.h - dP with sums in FP16 ---------------------------------===//
//
// templates/tile/math/dp_sums16.cuh says what is computed and why. Everything here is that of the
// kernels bit for bit, if the tensor cores add as half_products() says.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::reference {

/// Rounds to nearest even among numbers of FP16; a NaN stays one.
double round_to_half(double);

/// C = A B^T of FP16 numbers, with sums in FP16 as mma.sync.m16n8k16 forms them: from 0 on, the
/// exact sum of 16 products and of the sum so far is rounded once. A is m x k, B is n x k.
void half_products(int64_t m, int64_t n, int64_t k, const double* a, const double* b, double* c);

/// A power of two and its inverse. Both are NaN for what is not finite.
struct Power {
  float value, inverse;
};
/// The power of two, within 2^-126 and 2^126, that brings a magnitude below 2^exponent and, if it
/// lies within these bounds, not below 2^(exponent - 1).
Power power_below(int exponent, float magnitude);

/// The values of one head as dP's product has them: less `centre`, times a power of two, in FP16.
class CentredValues {
public:
  /// Takes keys x channels values, for kernels that compute with `width` channels.
  CentredValues(const float* v, int64_t keys, int64_t channels, int width);

  std::vector<float> centre; ///< the mean of the values; 0 in channels where it is not finite

  /// dp = 2^-exponent (dO V^T - dO centre) for some rows of dO, rows x keys.
  void multiply(const float* dout, int64_t rows, const int* exponents, float* dp) const;

private:
  int64_t keys_, channels_;
  float inverse_; ///< of the power of two
  std::vector<double> values_;
};

} // namespace sagebwd::reference
