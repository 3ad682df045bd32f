//===- beside_lists.h - Kernels of SLA2, each launched alone ----------------===//
#pragma once

#include "runtime/linear_branch.h"
#include "tests/gpu/device.h"

#include <cmath>
#include <random>

namespace sagebwd::test {

using Values = std::vector<float>;
using Exact = std::vector<double>;

/// CASE has head_dim, dtype, queries and keys of a block, problem and layout.
template <typename CASE>
class BesideLists : public OnGpu, public testing::WithParamInterface<CASE> {
protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped())
      return;
    AttentionSpec spec;
    spec.head_dim = static_cast<int>(d), spec.dtype = dtype;
    spec.sparse_q = of_case.queries, spec.sparse_kv = of_case.keys;
    attention.emplace(spec, 0);
  }

  const CASE& of_case = this->GetParam();
  const Problem p = of_case.problem;
  const int64_t d = of_case.head_dim;
  const DType dtype = of_case.dtype;
  const int64_t heads = p.batch * p.heads, heads_kv = p.batch * p.heads_kv;
  const int64_t lists = ceil_div(p.seq_q, of_case.queries);
  const int64_t blocks = ceil_div(p.seq_kv, of_case.keys);
  std::mt19937 draw{3};
  std::optional<Attention> attention;
  std::vector<LinearCall::Given> given;
  std::vector<std::unique_ptr<DeviceTensor>> tensors;
  std::vector<std::unique_ptr<Buffer>> buffers;
  Faults faults;

  Values drawn(int64_t count, DType type, float size = 1, float offset = 0) {
    std::normal_distribution<float> normal;
    Values values(static_cast<size_t>(count));
    for (float& x : values)
      x = reference::round_to(type, offset + size * normal(draw));
    return values;
  }

  /// A tensor of 16 bits of so many heads and tokens, with the strides of the case if the kernel
  /// takes strides.
  DeviceTensor& give(Operand name, DType type, int64_t of_batch, int64_t of_heads, int64_t tokens,
                     const Values* values, bool strided = false) {
    tensors.push_back(std::make_unique<DeviceTensor>(type, of_batch, of_heads, tokens, d,
                                                     strided ? of_case.layout : Layout(), kPoison));
    DeviceTensor& tensor = *tensors.back();
    if (values)
      tensor.upload(*values);
    const Tensor& view = tensor.view();
    given.push_back({name,
                     reinterpret_cast<uint64_t>(view.data),
                     {view.stride_b, view.stride_h, view.stride_s}});
    return tensor;
  }
  DeviceTensor& queries(Operand name, const Values* values, bool strided = true) {
    return give(name, dtype, p.batch, p.heads, p.seq_q, values, strided);
  }
  template <typename T = float>
  Buffer& numbers(Operand name, int64_t count, const std::vector<T>* values = nullptr,
                  std::initializer_list<int64_t> strides = {}) {
    buffers.push_back(std::make_unique<Buffer>(count * sizeof(T)));
    if (values)
      buffers.back()->upload(*values);
    given.push_back({name, buffers.back()->pointer()});
    std::copy(strides.begin(), strides.end(), given.back().strides);
    return *buffers.back();
  }

  void launch(KernelKind kernel, bool one_sum = false) {
    driver::synchronize();
    launch_linear({kernel, p, given, one_sum, nullptr}, *attention);
    driver::synchronize();
    for (const auto& buffer : buffers)
      buffer->check_guards("numbers", faults);
    EXPECT_EQ(faults, Faults());
  }

  /// Infinities must be where they are expected.
  static void expect_near(const Values& values, const Exact& exact, double limit,
                          const char* what) {
    ASSERT_EQ(values.size(), exact.size()) << what;
    double error = 0, size = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      if (std::isinf(exact[i])) {
        ASSERT_EQ(values[i], exact[i]) << what << " " << i;
        continue;
      }
      ASSERT_TRUE(std::isfinite(values[i])) << what << " " << i;
      error += (values[i] - exact[i]) * (values[i] - exact[i]), size += exact[i] * exact[i];
    }
    EXPECT_LE(std::sqrt(error / size), limit) << what;
    EXPECT_GT(size, 0) << what;
  }
};

} // namespace sagebwd::test
