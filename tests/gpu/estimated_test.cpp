//===- estimated_test.cpp - Kernels of what unlisted keys would weigh -------===//
//
// Each kernel alone, against its formula in FP64, from means that are drawn.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/beside_lists.h"

#include <numbers>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

struct EstimatedCase {
  const char* name;
  int head_dim;
  DType dtype;
  int queries, keys; ///< of a block
  Problem problem;
  Layout layout;
  bool shared; ///< one set of lists for all heads
};

class Estimated : public BesideLists<EstimatedCase> {
protected:
  void SetUp() override {
    BesideLists::SetUp();
    if (IsSkipped())
      return;
    q = drawn(heads * p.seq_q * d, dtype);
    means = drawn(heads_kv * blocks * d, dtype, 0.3f);
    mean = drawn(heads_kv * d, DType::bf16, 0.5f);
    drest = drawn(heads * p.seq_q, DType::bf16);
    for (int64_t i = 0; i < (GetParam().shared ? 1 : heads) * lists * blocks; ++i)
      mask.push_back(i / blocks % lists == 1 || (i / blocks % lists > 1 && draw() % 3 == 0));
    find_exact();
  }

  Values q, means, mean, drest;
  std::vector<int8_t> mask; ///< of lists: the first has nothing, the second everything
  Exact rest, centred, dq, dk;

  /// The formulas, of means whose products with queries are logarithms to base 2.
  void find_exact() {
    const double infinity = std::numeric_limits<double>::infinity();
    rest.assign(static_cast<size_t>(heads * p.seq_q), -infinity),
        centred.assign(rest.size(), infinity);
    dq.assign(q.size(), 0), dk.assign(means.size(), 0);
    for (int64_t row = 0; row < heads * p.seq_q; ++row) {
      const int64_t head = row / p.seq_q, list = row % p.seq_q / GetParam().queries;
      const int64_t kv = head / p.heads * p.heads_kv + head % p.heads / (p.heads / p.heads_kv);
      const int8_t* listed = &mask[((GetParam().shared ? 0 : head) * lists + list) * blocks];
      Exact weights(static_cast<size_t>(blocks));
      double sum = 0, of_mean = 0;
      for (int64_t j = 0; j < blocks; ++j) {
        double score = 0;
        for (int64_t c = 0; c < d; ++c)
          score += double{q[row * d + c]} * means[(kv * blocks + j) * d + c];
        const int64_t tokens = std::min<int64_t>(GetParam().keys, p.seq_kv - j * GetParam().keys);
        weights[j] = listed[j] ? 0 : tokens * std::exp2(score);
        sum += weights[j];
      }
      if (sum == 0)
        continue;
      for (int64_t c = 0; c < d; ++c)
        of_mean += double{q[row * d + c]} * mean[kv * d + c];
      centred[row] = std::log2(sum), rest[row] = std::log(sum) + of_mean;
      for (int64_t c = 0; c < d; ++c) {
        dq[row * d + c] = drest[row] * double{mean[kv * d + c]};
        for (int64_t j = 0; j < blocks; ++j) {
          const double share = drest[row] * weights[j] / sum;
          dq[row * d + c] += share * means[(kv * blocks + j) * d + c] * std::numbers::ln2;
          dk[(kv * blocks + j) * d + c] += share * q[row * d + c];
        }
      }
    }
  }

  template <typename T> void give_numbers(Operand name, const std::vector<T>& values) {
    numbers<T>(name, static_cast<int64_t>(values.size()), &values);
  }
  void give_inputs(bool with_mean) {
    given.clear();
    queries(Operand::q, &q);
    give(Operand::pooled_keys, dtype, p.batch, p.heads_kv, blocks, &means);
    give_numbers(Operand::block_mask, mask);
    if (!GetParam().shared)
      given.back().strides[0] = p.heads * lists * blocks, given.back().strides[1] = lists * blocks;
    if (with_mean)
      give_numbers(Operand::pooled_mean, mean);
  }
};

TEST_P(Estimated, Rest) {
  give_inputs(true);
  const Buffer& of_rest = numbers(Operand::rest, heads * p.seq_q);
  const Buffer& of_centred = numbers(Operand::centred_rest, heads * p.seq_q);
  launch(KernelKind::estimated_rest);
  expect_near(of_rest.download<float>(), rest, 1e-5, "rest");
  expect_near(of_centred.download<float>(), centred, 1e-5, "centred rest");
}

/// Whatever the gradient is where nothing is left.
TEST_P(Estimated, Gradients) {
  const Values centred_rest(centred.begin(), centred.end());
  Values given_drest = drest;
  for (size_t i = 0; i < given_drest.size(); ++i)
    if (std::isinf(centred[i]))
      given_drest[i] = std::numeric_limits<float>::quiet_NaN();
  give_inputs(true);
  give_numbers(Operand::centred_rest, centred_rest);
  give_numbers(Operand::drest, given_drest);
  const DeviceTensor& of_q = queries(Operand::dq, nullptr);
  launch(KernelKind::estimated_dq);
  const double limit = dtype == DType::bf16 ? 0.005 : 0.001;
  expect_near(of_q.download("dq", faults), dq, limit, "dq");
  const Values more = drawn(heads * p.seq_q * d, dtype);
  Exact with_more = dq;
  for (size_t i = 0; i < more.size(); ++i)
    with_more[i] += more[i];
  queries(Operand::dq_more, &more, false);
  launch(KernelKind::estimated_dq);
  expect_near(of_q.download("dq", faults), with_more, limit, "dq and more");

  give_inputs(false);
  give_numbers(Operand::centred_rest, centred_rest);
  give_numbers(Operand::drest, given_drest);
  const int64_t parts = estimated_parts(attention->spec(), p), each = blocks * d;
  const Buffer& of_k = numbers(Operand::pooled_dsums, heads * parts * each);
  launch(KernelKind::estimated_dk);
  const Values found = of_k.download<float>();
  Values sums(dk.size());
  for (size_t i = 0; i < found.size(); ++i) { // heads of a group follow one another
    const int64_t head = static_cast<int64_t>(i) / (parts * each);
    const int64_t kv = head / (p.heads / p.heads_kv);
    sums[kv * each + static_cast<int64_t>(i) % each] += found[i];
  }
  expect_near(sums, dk, 0.005, "sums of dk");
}

TEST_P(Estimated, WrongCallsAreRefused) {
  const auto expect_refused = [&](KernelKind kernel, const std::string& why) {
    try {
      launch_linear({kernel, p, given, false, nullptr}, *attention);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  expect_refused(KernelKind::estimated_rest, "q of estimated_rest is missing");
  give_inputs(true);
  expect_refused(KernelKind::estimated_rest, "rest of estimated_rest is missing");
  expect_refused(KernelKind::estimated_dk, "pooled_mean is no tensor of estimated_dk");
  given = {{Operand::rest, 0x102}};
  expect_refused(KernelKind::estimated_rest, "not a multiple of 4 bytes");
  given = {{Operand::pooled_keys, 0x108}};
  expect_refused(KernelKind::estimated_dk, "not a multiple of 16 bytes");
}

using enum DType;
const EstimatedCase kEstimatedCases[] = {
    {"D64_bf16_128x64", 64, bf16, 128, 64, {2, 4, 2, 300, 200}, {true, 8}, false},
    {"D64_fp16_64x128", 64, fp16, 64, 128, {1, 2, 1, 129, 128 * 65 + 1}, {}, true},
    {"D128_bf16_128x128", 128, bf16, 128, 128, {1, 2, 2, 513, 130}, {false, 16}, true},
    {"D128_fp16_64x64", 128, fp16, 64, 64, {1, 4, 1, 190, 64 * 66}, {true, 0}, false},
};
INSTANTIATE_TEST_SUITE_P(Gpu, Estimated, testing::ValuesIn(kEstimatedCases),
                         [](const auto& info) { return std::string(info.param.name); });

} // namespace
