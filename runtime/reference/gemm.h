//===- gemm.h - Small matrix products on the CPU --------------------------===//
//
// The order of summation depends on the sizes alone, never on the machine, so results are the
// same bits everywhere. Products of 8-bit integers run in FP32, where they are exact.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>

namespace sagebwd::reference {

/// Products of signed and unsigned bytes are exact in FP32 as long as |sum| <= 2^24.
inline constexpr int64_t kExactIntegerDepth = (int64_t(1) << 24) / (255 * 127);

/// Element (i, j) lies at data[i * row_stride + j * column_stride].
template <typename T> struct MatrixView {
  const T* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  MatrixView transposed() const { return {data, column_stride, row_stride}; }
};

/// C = A B, or C += A B where `accumulate`; A is m x k, B k x n, C's rows are contiguous.
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<float> a, MatrixView<float> b, float* c,
          int64_t c_stride, bool accumulate = false);
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<double> a, MatrixView<double> b, double* c,
          int64_t c_stride, bool accumulate = false);

} // namespace sagebwd::reference
