//===- sanitizer_test.cpp - Every kernel once, for compute-sanitizer -------===//
//
// bench/sanitize.py runs these under compute-sanitizer's tools. Memory is neither filled nor
// padded: initcheck must see what is read before it is written, memcheck the first byte too far.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/cases.h"

#include <cmath>
#include <cstdio>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class Sanitizer : public CaseTest {
protected:
  void TearDown() override {
    for (driver::Pointer pointer : memory_)
      driver::release(pointer);
  }
  void* allocate(size_t bytes) {
    memory_.push_back(driver::allocate(bytes));
    return reinterpret_cast<void*>(memory_.back());
  }
  template <typename T> T* upload(const std::vector<T>& values) {
    void* memory = allocate(values.size() * sizeof(T));
    driver::copy_to_device(memory_.back(), values.data(), values.size() * sizeof(T));
    return static_cast<T*>(memory);
  }
  template <typename T> std::vector<T> download(const void* memory, size_t count) {
    std::vector<T> values(count);
    driver::copy_to_host(values.data(), reinterpret_cast<driver::Pointer>(memory),
                         count * sizeof(T));
    return values;
  }

private:
  std::vector<driver::Pointer> memory_;
};

TEST_P(Sanitizer, ForwardAndBackward) {
  const AttentionSpec& spec = attention->spec();
  const int64_t m = 200, n = 300, d = spec.head_dim;
  const Problem problem{1, 2, 1, m, n};
  const auto in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 1);
  printf("spec: %s, %s\n", to_string(spec).c_str(),
         GetParam().tiles ? to_string(GetParam().tiles->begin()->second).c_str() : "default tiles");

  const auto encoded = [&](const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    for (float x : values)
      bits.push_back(reference::encode(spec.dtype, x));
    return upload(bits);
  };
  const auto queries = [&](void* data) { return Tensor{data, 2 * m * d, m * d, d}; };
  const auto keys = [&](void* data) { return Tensor{data, n * d, n * d, d}; };
  const float scale = 1 / std::sqrt(static_cast<float>(d));

  ForwardArgs forward;
  forward.problem = problem;
  forward.q = queries(encoded(in.q));
  forward.k = keys(encoded(in.k));
  forward.v = keys(encoded(in.v));
  forward.out = queries(allocate(2 * 2 * m * d));
  forward.lse = static_cast<float*>(allocate(4 * 2 * m));
  forward.softmax_scale = scale;
  forward.workspace_bytes = attention->forward_workspace_bytes(problem);
  forward.workspace = allocate(forward.workspace_bytes);
  attention->forward(forward);

  BackwardArgs backward;
  backward.problem = problem;
  backward.q = forward.q, backward.k = forward.k, backward.v = forward.v;
  backward.out = forward.out;
  backward.dout = queries(encoded(in.dout));
  backward.lse = forward.lse;
  backward.dlse = upload(std::vector<float>(2 * m, 0.5f));
  backward.dq = queries(allocate(2 * 2 * m * d));
  backward.dk = keys(allocate(2 * n * d));
  backward.dv = keys(allocate(2 * n * d));
  backward.softmax_scale = scale;
  backward.workspace_bytes = attention->backward_workspace_bytes(problem);
  backward.workspace = allocate(backward.workspace_bytes);
  attention->backward(backward);
  driver::synchronize();

  for (float x : download<float>(forward.lse, 2 * m))
    ASSERT_TRUE(std::isfinite(x));
  for (const Tensor& tensor : {forward.out, backward.dq, backward.dk, backward.dv})
    for (uint16_t x : download<uint16_t>(tensor.data, tensor.stride_b))
      ASSERT_TRUE(std::isfinite(reference::decode(spec.dtype, x)));
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, Sanitizer,
    testing::ValuesIn(cases_named(
        {"D128_bf16_Row", "D64_bf16_Row_TopLeft", "D128_bf16_Row64", "D64_fp16_Block_TopLeft",
         "D128_bf16_Qk16", "D128_bf16_Row_Unsmoothed", "Wgmma8Warps_D64_bf16_Row128",
         "Mma_D128_bf16_Row64", "Mma_D64_fp16_Row_TopLeft", "Mma_D128_bf16_Block"})),
    case_name);

} // namespace
