//===- gemm.h - Small matrix products on the CPU --------------------------===//
//
// The order of summation depends only on the sizes, not on the machine, so results have the same
// bits everywhere. Products of 8-bit integers run in FP32, where they are exact.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>

namespace sagebwd::reference {

/// The largest depth at which sums of products of signed and unsigned bytes are exact in FP32:
/// |sum| <= 2^24.
inline constexpr int64_t kExactIntegerDepth = (int64_t(1) << 24) / (255 * 127);

/// Element (i, j) lies at data[i * row_stride + j * column_stride].
template <typename T> struct MatrixView {
  const T* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  MatrixView transposed() const { return {data, column_stride, row_stride}; }
};

/// C = A B, or C += A B if `accumulate`. A is m x k and B is k x n; rows of C are contiguous.
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<float> a, MatrixView<float> b, float* c,
          int64_t c_stride, bool accumulate = false);
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<double> a, MatrixView<double> b, double* c,
          int64_t c_stride, bool accumulate = false);

} // namespace sagebwd::reference
