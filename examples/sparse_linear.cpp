//===- sparse_linear.cpp - SLA2's attention from C++ ------------------------===//
//
// Exact attention to listed blocks of keys and linear attention to all others, mixed by alpha
// (SLA2, arXiv 2602.12675), as one operation with gradients of q, k, v and alpha. It packs lists
// from a mask, runs both passes on the GPU and checks the output against FP64 on the CPU.
//
//   target_link_libraries(your_program PRIVATE sagebwd::sagebwd)
//
//===----------------------------------------------------------------------===//
#include "sagebwd/runtime/attention.h"
#include "sagebwd/runtime/driver/driver.h"
#include "sagebwd/runtime/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

using namespace sagebwd;

namespace {

constexpr Problem kProblem{/*batch=*/1, /*heads=*/2, /*heads_kv=*/1, /*seq_q=*/512, /*seq_kv=*/512};
constexpr int kDim = 64;   ///< the kernels of linear attention have 64 or 128
constexpr int kBlock = 64; ///< queries of a list, and keys of a block that it lists
constexpr int64_t kBlocks = 512 / kBlock;

/// Each block of queries lists two blocks of keys: the first one and its own.
bool lists_block(int64_t queries, int64_t keys) { return keys == 0 || keys == queries; }

/// Device memory with these values, or, without values, of this many that are not yet written.
template <typename T> struct Values {
  explicit Values(size_t count) : memory(sizeof(T) * count) {}
  explicit Values(const std::vector<T>& values) : Values(values.size()) {
    driver::copy_to_device(memory.pointer(), values.data(), memory.bytes());
  }
  T* data() const { return reinterpret_cast<T*>(memory.pointer()); }
  std::vector<T> download() const {
    std::vector<T> values(memory.bytes() / sizeof(T));
    driver::copy_to_host(values.data(), memory.pointer(), memory.bytes());
    return values;
  }
  driver::Memory memory;
};

std::vector<uint16_t> encoded(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (float value : values)
    bits.push_back(reference::encode(DType::bf16, value));
  return bits;
}

/// A contiguous (batch, head, token, channel) tensor.
Tensor tensor(const Values<uint16_t>& values, int64_t heads, int64_t tokens) {
  return {values.data(), heads * tokens * kDim, tokens * kDim, kDim};
}

/// The feature map of linear attention: the softmax over channels, of keys less their mean.
std::vector<double> features(const float* x, const double* mean) {
  std::vector<double> f(kDim);
  double sum = 0;
  for (int c = 0; c < kDim; ++c)
    sum += f[c] = std::exp(x[c] - (mean ? mean[c] : 0));
  for (double& value : f)
    value /= sum;
  return f;
}

/// The mixed output in FP64, of (head, query, channel).
std::vector<double> expected(const reference::Inputs& in, const std::vector<float>& alpha) {
  const auto& [batch, heads, heads_kv, queries, keys] = kProblem;
  double mean[kDim] = {};
  for (size_t i = 0; i < in.k.size(); ++i)
    mean[i % kDim] += double{in.k[i]} / static_cast<double>(keys);
  std::vector<std::vector<double>> of_keys;
  for (int64_t key = 0; key < keys; ++key)
    of_keys.push_back(features(&in.k[key * kDim], mean));
  std::vector<double> out(in.q.size());
  for (int64_t row = 0; row < heads * queries; ++row) {
    const float* q = &in.q[row * kDim];
    const int64_t block = row % queries / kBlock;
    const std::vector<double> of_query = features(q, nullptr);
    std::vector<double> weights;
    double sums[2] = {}; // of the weights of linear and of exact attention
    for (int64_t key = 0; key < keys; ++key) {
      const bool listed = lists_block(block, key / kBlock);
      double score = 0, linear = 0;
      for (int c = 0; c < kDim; ++c) {
        score += double{q[c]} * double{in.k[key * kDim + c]};
        linear += of_query[c] * of_keys[key][c];
      }
      weights.push_back(listed ? std::exp(score / std::sqrt(kDim)) : linear);
      sums[listed] += weights.back();
    }
    const double share = alpha[row / queries * kBlocks + block];
    for (int64_t key = 0; key < keys; ++key) {
      const bool listed = lists_block(block, key / kBlock);
      const double weight = (listed ? share : 1 - share) * weights[key] / sums[listed];
      for (int c = 0; c < kDim; ++c)
        out[row * kDim + c] += weight * double{in.v[key * kDim + c]};
    }
  }
  return out;
}

int run() {
  AttentionSpec spec;
  spec.head_dim = kDim;
  spec.sparse_q = spec.sparse_kv = kBlock;
  spec.linear = LinearKeys::complement;

  const auto& [batch, heads, heads_kv, queries, keys] = kProblem;
  const reference::Inputs in =
      reference::random_inputs(kProblem, kDim, spec.dtype, /*sigma=*/1, /*seed=*/0);
  std::vector<float> alpha; // one for each list
  for (int64_t list = 0; list < heads * kBlocks; ++list)
    alpha.push_back(0.5f + 0.02f * static_cast<float>(list));
  std::vector<uint8_t> mask; // shared by all heads: (1, 1, lists, blocks)
  for (int64_t list = 0; list < kBlocks; ++list)
    for (int64_t block = 0; block < kBlocks; ++block)
      mask.push_back(lists_block(list, block));

  const driver::DeviceScope scope(/*ordinal=*/0);
  Attention attention(spec, /*device=*/0);
  void* const stream = nullptr; // the default one

  // Lists are read as bits.
  const Values<uint8_t> device_mask(mask);
  const Values<uint32_t> row_bits(
      static_cast<size_t>(kBlocks * list_words(attention.spec(), kProblem)));
  ListsToPack lists;
  lists.problem = kProblem;
  lists.problem.heads = lists.problem.heads_kv = 1;
  lists.mask = device_mask.data();
  lists.row_bits = row_bits.data();
  lists.stream = stream;
  attention.pack_lists(lists);

  const Values<uint16_t> q(encoded(in.q)), k(encoded(in.k)), v(encoded(in.v));
  const Values<uint16_t> dout(encoded(in.dout)), out(in.q.size()), sparse_out(in.q.size());
  const Values<uint16_t> dq(in.q.size()), dk(in.k.size()), dv(in.v.size());
  const Values<float> device_alpha(alpha), lse(static_cast<size_t>(heads * queries));
  const Values<float> dalpha(static_cast<size_t>(heads * queries));
  // The library allocates nothing: it says how much it needs. Both passes may share it.
  const Values<char> workspace(std::max(attention.forward_workspace_bytes(kProblem),
                                        attention.backward_workspace_bytes(kProblem)));

  ForwardArgs forward;
  forward.problem = kProblem;
  forward.q = tensor(q, heads, queries);
  forward.k = tensor(k, heads_kv, keys);
  forward.v = tensor(v, heads_kv, keys);
  forward.out = tensor(out, heads, queries);
  forward.lse = lse.data();
  forward.softmax_scale = 1 / std::sqrt(static_cast<float>(kDim));
  forward.workspace = workspace.data();
  forward.workspace_bytes = workspace.memory.bytes();
  forward.stream = stream;
  forward.lists = {row_bits.data(), /*stride_b=*/0, /*stride_h=*/0};
  forward.shares = {device_alpha.data(), heads * kBlocks, kBlocks, 1, /*tokens=*/kBlock};
  forward.sparse_out = tensor(sparse_out, heads, queries);
  attention.forward(forward);

  BackwardArgs backward;
  backward.problem = kProblem;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.sparse_out; // not the mixed output
  backward.dout = tensor(dout, heads, queries);
  backward.lse = forward.lse;
  backward.dq = tensor(dq, heads, queries);
  backward.dk = tensor(dk, heads_kv, keys);
  backward.dv = tensor(dv, heads_kv, keys);
  backward.softmax_scale = forward.softmax_scale;
  backward.workspace = forward.workspace;
  backward.workspace_bytes = forward.workspace_bytes;
  backward.stream = stream;
  backward.lists = forward.lists;
  backward.shares = forward.shares;
  backward.dalpha = dalpha.data(); // of each query: alpha's is the sum over the queries of a list
  attention.backward(backward);
  driver::synchronize();

  printf("%s\n", to_string(attention.spec()).c_str());
  printf("%lld heads, %lld queries, %lld keys: %zu bytes of lists, %zu of workspace\n",
         static_cast<long long>(heads), static_cast<long long>(queries),
         static_cast<long long>(keys), row_bits.memory.bytes(), workspace.memory.bytes());
  const std::vector<float> of_queries = dalpha.download();
  double of_first = 0;
  for (int query = 0; query < kBlock; ++query)
    of_first += of_queries[query];
  std::vector<float> found;
  for (uint16_t element : out.download())
    found.push_back(reference::decode(spec.dtype, element));
  const double error = reference::compare(found, expected(in, alpha)).rel_l2;
  printf("gradient of the first alpha %.4f; relative L2 error of O %.4f\n", of_first, error);
  return error < 0.03 ? 0 : 1;
}

} // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    fprintf(stderr, "sparse_linear_example: %s\n", error.what());
    return 1;
  }
}
