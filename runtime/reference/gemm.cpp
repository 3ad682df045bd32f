//===- gemm.cpp - Small matrix products on the CPU ------------------------===//
//
// Both operands are packed; then blocks of C are kept in registers. Vectors run over the columns of
// C, so the order of a sum does not depend on the width of vectors. Products and sums are not
// fused.
//
//===----------------------------------------------------------------------===//
#include "runtime/reference/gemm.h"

#include <algorithm>
#include <vector>

// A fused multiply-add rounds once; machines without it would round twice and get other bits.
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace sagebwd::reference {
namespace {

constexpr int64_t kDepth = 256; ///< of one packed slice, which stays in the first-level cache
constexpr int kRows = 6;        ///< rows of C in registers, each with one cache line of columns
template <typename T> constexpr int kColumns = 64 / sizeof(T);

/// Packs `count` vectors of `depth` elements so that `width` of them lie side by side at each
/// depth. Missing vectors are zeros.
template <typename T, int width>
void pack(const T* from, int64_t vector_stride, int64_t depth_stride, int64_t count, int64_t depth,
          T* to) {
  for (int64_t first = 0; first < count; first += width, to += depth * width) {
    const int64_t valid = std::min<int64_t>(width, count - first);
    const T* corner = from + first * vector_stride;
    if (valid < width)
      std::fill(to, to + depth * width, T(0));
    if (vector_stride == 1) {
      for (int64_t d = 0; d < depth; ++d)
        std::copy_n(corner + d * depth_stride, valid, to + d * width);
    } else {
      for (int64_t i = 0; i < valid; ++i)
        for (int64_t d = 0; d < depth; ++d)
          to[d * width + i] = corner[i * vector_stride + d * depth_stride];
    }
  }
}

/// Computes a block of C from packed operands: sum[i][j] = sum over d of a[d][i] b[d][j], in strips
/// of columns whose sums fit into the registers of a machine with vectors of `bytes` bytes.
template <int bytes, typename T>
[[gnu::always_inline]] inline void multiply_block(int64_t depth, const T* a, const T* b,
                                                  T* result) {
  typedef T Vector __attribute__((vector_size(bytes), aligned(alignof(T)), may_alias));
  constexpr int width = bytes / sizeof(T);
  constexpr int vectors = bytes == 64 ? 1 : 2;
  for (int strip = 0; strip < kColumns<T>; strip += vectors * width) {
    Vector sum[kRows][vectors] = {};
    for (int64_t d = 0; d < depth; ++d) {
      const auto* row = reinterpret_cast<const Vector*>(b + d * kColumns<T> + strip);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; ++j)
          sum[i][j] += a[d * kRows + i] * row[j];
    }
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < vectors; ++j)
        *reinterpret_cast<Vector*>(result + i * kColumns<T> + strip + j * width) = sum[i][j];
  }
}

// One binary runs on every x86-64: the loader chooses the widest version that the CPU supports.
#define SAGEBWD_BLOCK(attributes, bytes)                                                           \
  attributes void block(int64_t depth, const float* a, const float* b, float* result) {            \
    multiply_block<bytes>(depth, a, b, result);                                                    \
  }                                                                                                \
  attributes void block(int64_t depth, const double* a, const double* b, double* result) {         \
    multiply_block<bytes>(depth, a, b, result);                                                    \
  }
#ifdef __x86_64__
SAGEBWD_BLOCK(__attribute__((target("avx512f"))), 64)
SAGEBWD_BLOCK(__attribute__((target("avx2"))), 32)
SAGEBWD_BLOCK(__attribute__((target("default"))), 16)
#else
SAGEBWD_BLOCK(, 16)
#endif

template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, MatrixView<T> a, MatrixView<T> b, T* c,
              int64_t c_stride, bool accumulate) {
  if (!accumulate)
    for (int64_t i = 0; i < m; ++i)
      std::fill_n(c + i * c_stride, n, T(0));
  constexpr int columns = kColumns<T>;
  const auto whole = [](int64_t count, int64_t width) {
    return (count + width - 1) / width * width;
  };
  thread_local std::vector<T> packed_a, packed_b;
  const int64_t slice = std::min(k, kDepth);
  packed_a.resize(std::max<size_t>(packed_a.size(), whole(m, kRows) * slice));
  packed_b.resize(std::max<size_t>(packed_b.size(), columns * slice));

  for (int64_t first = 0; first < k; first += kDepth) {
    const int64_t depth = std::min(kDepth, k - first);
    pack<T, kRows>(a.data + first * a.column_stride, a.row_stride, a.column_stride, m, depth,
                   packed_a.data());
    for (int64_t j = 0; j < n; j += columns) {
      const int64_t valid_columns = std::min<int64_t>(columns, n - j);
      pack<T, columns>(b.data + first * b.row_stride + j * b.column_stride, b.column_stride,
                       b.row_stride, valid_columns, depth, packed_b.data());
      for (int64_t i = 0; i < m; i += kRows) {
        alignas(64) T result[kRows * columns];
        block(depth, packed_a.data() + i * depth, packed_b.data(), result);
        for (int64_t r = 0; r < std::min<int64_t>(kRows, m - i); ++r)
          for (int64_t l = 0; l < valid_columns; ++l)
            c[(i + r) * c_stride + j + l] += result[r * columns + l];
      }
    }
  }
}

} // namespace

void gemm(int64_t m, int64_t n, int64_t k, MatrixView<float> a, MatrixView<float> b, float* c,
          int64_t c_stride, bool accumulate) {
  multiply(m, n, k, a, b, c, c_stride, accumulate);
}
void gemm(int64_t m, int64_t n, int64_t k, MatrixView<double> a, MatrixView<double> b, double* c,
          int64_t c_stride, bool accumulate) {
  multiply(m, n, k, a, b, c, c_stride, accumulate);
}

} // namespace sagebwd::reference
