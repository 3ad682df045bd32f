//===- linear_test.cpp - Kernels of linear attention beside lists -----------===//
//
// Each kernel alone, against its formulas in FP64. Sums over blocks, which lie between the kernels,
// are drawn.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/beside_lists.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

struct LinearCase {
  const char* name;
  int head_dim;
  DType dtype;
  int queries, keys; ///< of a block
  Problem problem;
  Layout layout;
};

class Linear : public BesideLists<LinearCase> {
protected:
  Values positive(int64_t count) {
    std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
    Values values(static_cast<size_t>(count));
    for (float& x : values)
      x = uniform(draw);
    return values;
  }

  DeviceTensor& keys(Operand name, const Values* values, bool strided = true) {
    return give(name, dtype, p.batch, p.heads_kv, p.seq_kv, values, strided);
  }
  /// A matrix of channels by channels for each of `count`.
  DeviceTensor& matrices(Operand name, int64_t count, const Values* values) {
    return give(name, DType::bf16, 1, 1, count * d, values);
  }
  Buffer& floats(Operand name, int64_t count, const Values* values,
                 std::initializer_list<int64_t> strides = {}) {
    return numbers(name, count, values, strides);
  }
  Values got(const DeviceTensor& tensor) {
    Values values = tensor.download("a result", faults);
    EXPECT_EQ(faults, Faults());
    return values;
  }

  /// phi of a row.
  Exact phi(const float* row, const float* mean = nullptr) const {
    Exact x(static_cast<size_t>(d));
    double sum = 0;
    for (int64_t c = 0; c < d; ++c)
      sum += x[c] = std::exp(double{row[c]} - (mean ? double{mean[c]} : 0.0));
    for (double& value : x)
      value /= sum;
    return x;
  }
  int64_t kv_of(int64_t head) const {
    return head / p.heads * p.heads_kv + head % p.heads / (p.heads / p.heads_kv);
  }
};

constexpr double kRounded = 0.005; ///< two or three roundings to bf16

TEST_P(Linear, States) {
  const Values k = drawn(heads_kv * p.seq_kv * d, dtype, 2, 1), v = drawn(k.size(), dtype);
  const Values mean = drawn(heads_kv * d, DType::bf16);
  for (const bool centred : {false, true}) {
    given.clear();
    keys(Operand::k, &k), keys(Operand::v, &v);
    if (centred)
      floats(Operand::given_k_mean, heads_kv * d, &mean);
    const DeviceTensor& h = matrices(Operand::key_states, heads_kv * blocks, nullptr);
    const Buffer& z = floats(Operand::key_norms, heads_kv * blocks * d, nullptr);
    launch(KernelKind::linear_states);
    Exact exact_h(heads_kv * blocks * d * d), exact_z(heads_kv * blocks * d);
    for (int64_t head = 0; head < heads_kv; ++head)
      for (int64_t key = 0; key < p.seq_kv; ++key) {
        const int64_t row = (head * p.seq_kv + key) * d;
        const Exact g = phi(&k[row], centred ? &mean[head * d] : nullptr);
        const int64_t block = head * blocks + key / GetParam().keys;
        for (int64_t c = 0; c < d; ++c) {
          exact_z[block * d + c] += g[c];
          for (int64_t e = 0; e < d; ++e)
            exact_h[(block * d + c) * d + e] += g[c] * v[row + e];
        }
      }
    expect_near(got(h), exact_h, kRounded, "h");
    expect_near(z.download<float>(), exact_z, 0.001, "z");
  }
}

/// O, and everything that the backward gives, with and without alpha, of a sum for each block of
/// queries or one for all.
TEST_P(Linear, OutputsAndTheirGradients) {
  const Values q = drawn(heads * p.seq_q * d, dtype, 2);
  const Values dout = drawn(q.size(), dtype), sparse = drawn(q.size(), dtype);
  const Values more = drawn(q.size(), dtype, 0.01f);
  for (const bool one : {false, true})
    for (const bool mixes : {false, true}) {
      SCOPED_TRACE(std::string(one ? "one sum" : "sums") + (mixes ? ", mixed" : ""));
      const int64_t sums = one ? heads_kv : heads * lists;
      const Values h = drawn(sums * d * d, DType::bf16), z = positive(sums * d);
      Values alpha = positive(p.heads * p.seq_q);
      for (float& x : alpha)
        x -= 0.5f;
      const auto common = [&] {
        given.clear();
        queries(Operand::q, &q);
        matrices(Operand::query_sums, sums, &h), floats(Operand::query_norms, sums * d, &z);
        if (mixes) {
          queries(Operand::sparse_out, &sparse);
          floats(Operand::alpha, p.heads * p.seq_q, &alpha, {0, p.seq_q, 1});
        }
      };
      common();
      const DeviceTensor& out = queries(Operand::out, nullptr);
      launch(KernelKind::linear_out, one);
      const Values got_out = got(out);
      common();
      queries(Operand::dout, &dout);
      const DeviceTensor& dq = queries(Operand::dq, nullptr);
      const DeviceTensor& dh = matrices(Operand::query_dsums, heads * lists, nullptr);
      const Buffer& dz = floats(Operand::query_dnorms, heads * lists * d, nullptr);
      const Buffer* dalpha = nullptr;
      if (mixes) {
        queries(Operand::dq_more, &more);
        dalpha = &floats(Operand::dalpha, heads * p.seq_q, nullptr);
      }
      launch(KernelKind::linear_dout, one);

      Exact o(q.size()), exact_dq(q.size()), exact_dh(heads * lists * d * d);
      Exact exact_dz(heads * lists * d), exact_dalpha(heads * p.seq_q);
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t query = 0; query < p.seq_q; ++query) {
          const int64_t row = (head * p.seq_q + query) * d;
          const int64_t list = head * lists + query / GetParam().queries;
          const int64_t sum = one ? kv_of(head) : list;
          const double a = mixes ? alpha[head % p.heads * p.seq_q + query] : 0;
          const Exact f = phi(&q[row]);
          double u = 0, delta = 0;
          for (int64_t c = 0; c < d; ++c)
            u += f[c] * z[sum * d + c];
          for (int64_t e = 0; e < d; ++e) {
            double linear = 0;
            for (int64_t c = 0; c < d; ++c)
              linear += f[c] * h[(sum * d + c) * d + e] / u;
            o[row + e] = a * sparse[row + e] + (1 - a) * linear;
            delta += (1 - a) * dout[row + e] * linear;
            exact_dalpha[head * p.seq_q + query] += dout[row + e] * (sparse[row + e] - linear);
          }
          Exact df(static_cast<size_t>(d));
          double inner = 0;
          for (int64_t c = 0; c < d; ++c) {
            for (int64_t e = 0; e < d; ++e) {
              df[c] += (1 - a) * dout[row + e] * h[(sum * d + c) * d + e] / u;
              exact_dh[(list * d + c) * d + e] += f[c] / u * (1 - a) * dout[row + e];
            }
            df[c] -= delta * z[sum * d + c] / u;
            exact_dz[list * d + c] -= f[c] / u * delta;
            inner += f[c] * df[c];
          }
          for (int64_t c = 0; c < d; ++c)
            exact_dq[row + c] = f[c] * (df[c] - inner) + (mixes ? more[row + c] : 0);
        }
      expect_near(got_out, o, kRounded, "out");
      expect_near(got(dq), exact_dq, kRounded, "dq");
      expect_near(got(dh), exact_dh, kRounded, "dh");
      expect_near(dz.download<float>(), exact_dz, kRounded, "dz");
      if (mixes)
        expect_near(dalpha->download<float>(), exact_dalpha, 0.001, "dalpha");
    }
}

TEST_P(Linear, NothingLeftIsZero) {
  const Values q = drawn(heads * p.seq_q * d, dtype), dout = drawn(q.size(), dtype);
  const Values h(heads * lists * d * d), z(heads * lists * d);
  queries(Operand::q, &q);
  matrices(Operand::query_sums, heads * lists, &h);
  floats(Operand::query_norms, heads * lists * d, &z);
  const auto common = given;
  const DeviceTensor& out = queries(Operand::out, nullptr);
  launch(KernelKind::linear_out);
  for (float x : got(out))
    ASSERT_EQ(x, 0);
  given = common;
  queries(Operand::dout, &dout);
  const DeviceTensor& dq = queries(Operand::dq, nullptr);
  matrices(Operand::query_dsums, heads * lists, nullptr);
  floats(Operand::query_dnorms, heads * lists * d, nullptr);
  launch(KernelKind::linear_dout);
  for (float x : got(dq))
    ASSERT_EQ(x, 0);
}

TEST_P(Linear, GradientsOfKeysAndValues) {
  const Values k = drawn(heads_kv * p.seq_kv * d, dtype, 2, 1), v = drawn(k.size(), dtype);
  const Values more_dk = drawn(k.size(), dtype, 0.1f), more_dv = drawn(k.size(), dtype);
  const Values mean = drawn(heads_kv * d, DType::bf16);
  for (const bool one : {false, true})
    for (const bool centred : {false, true}) {
      SCOPED_TRACE(std::string(one ? "one sum" : "sums") + (centred ? ", centred" : ""));
      const int64_t sums = heads_kv * (one ? 1 : blocks);
      const Values a = drawn(sums * d * d, DType::bf16), y = drawn(sums * d, DType::bf16, 1, 3);
      given.clear();
      keys(Operand::k, &k), keys(Operand::v, &v);
      matrices(Operand::key_dsums, sums, &a), floats(Operand::key_dnorms, sums * d, &y);
      keys(Operand::dv_more, &more_dv);
      const DeviceTensor& dv = keys(Operand::dv, nullptr);
      const DeviceTensor& dk = keys(Operand::dk, nullptr, !centred);
      const uint64_t dk_address = given.back().address;
      const Buffer* dk_sums = nullptr;
      if (centred) {
        floats(Operand::given_k_mean, heads_kv * d, &mean);
        dk_sums = &floats(Operand::dk_sums, heads_kv * blocks * d, nullptr);
      } else {
        keys(Operand::dk_more, &more_dk);
      }
      launch(KernelKind::linear_dkv, one);
      Exact exact_dk(k.size()), exact_dv(k.size()), exact_sums(heads_kv * blocks * d);
      Values dk_mean(heads_kv * d);
      for (int64_t head = 0; head < heads_kv; ++head)
        for (int64_t key = 0; key < p.seq_kv; ++key) {
          const int64_t row = (head * p.seq_kv + key) * d, block = key / GetParam().keys;
          const int64_t sum = one ? head : head * blocks + block;
          const Exact g = phi(&k[row], centred ? &mean[head * d] : nullptr);
          Exact dg(static_cast<size_t>(d));
          double inner = 0;
          for (int64_t c = 0; c < d; ++c) {
            dg[c] = y[sum * d + c];
            for (int64_t e = 0; e < d; ++e) {
              dg[c] += double{v[row + e]} * a[(sum * d + c) * d + e];
              exact_dv[row + e] += g[c] * a[(sum * d + c) * d + e];
            }
            inner += g[c] * dg[c];
          }
          for (int64_t c = 0; c < d; ++c) {
            exact_dk[row + c] = g[c] * (dg[c] - inner);
            exact_sums[(head * blocks + block) * d + c] += exact_dk[row + c];
            dk_mean[head * d + c] += static_cast<float>(exact_dk[row + c] / p.seq_kv);
          }
        }
      for (size_t i = 0; i < k.size(); ++i) {
        exact_dv[i] += more_dv[i];
        exact_dk[i] += centred ? 0 : more_dk[i];
      }
      expect_near(got(dv), exact_dv, kRounded, "dv");
      expect_near(got(dk), exact_dk, kRounded, "dk");
      if (!centred)
        continue;
      expect_near(dk_sums->download<float>(), exact_sums, 0.01, "sums of dk");
      given = {{Operand::dk_linear, dk_address}};
      keys(Operand::dk_more, &more_dk);
      floats(Operand::dk_mean, heads_kv * d, &dk_mean);
      const DeviceTensor& whole = keys(Operand::dk, nullptr);
      launch(KernelKind::linear_dk);
      for (size_t i = 0; i < k.size(); ++i)
        exact_dk[i] += more_dk[i] - dk_mean[i / (p.seq_kv * d) * d + i % d];
      expect_near(got(whole), exact_dk, kRounded, "dk of keys");
    }
}

TEST_P(Linear, WrongCallsAreRefused) {
  const auto expect_refused = [&](KernelKind kernel, const std::string& why) {
    try {
      launch_linear({kernel, p, given, false, nullptr}, *attention);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  expect_refused(KernelKind::forward, "forward is no kernel of the linear branch");
  expect_refused(KernelKind::linear_states, "k of linear_states is missing");
  given = {{Operand::q, 0x100}};
  expect_refused(KernelKind::linear_states, "q is no tensor of linear_states");
  given = {{Operand::k, 0x108}};
  expect_refused(KernelKind::linear_states, "not a multiple of 16 bytes");
  given = {{Operand::alpha, 0x102}};
  expect_refused(KernelKind::linear_dout, "not a multiple of 4 bytes");
  given = {{Operand::k, 0x100, {64, 64, 4}}};
  expect_refused(KernelKind::linear_states, "a stride is 4 elements");
  AttentionSpec other;
  other.head_dim = 64;
  attention.emplace(other, 0);
  expect_refused(KernelKind::linear_states, "without lists of blocks");
  other.head_dim = 72, other.sparse_q = other.sparse_kv = 64;
  attention.emplace(other, 0);
  expect_refused(KernelKind::linear_states, "head_dim = 72");
}

using enum DType;
const LinearCase kCases[] = {
    {"D64_bf16_128x64", 64, bf16, 128, 64, {2, 4, 2, 300, 200}, {true, 8}},
    {"D64_fp16_64x128", 64, fp16, 64, 128, {1, 2, 1, 65, 129}, {}},
    {"D128_bf16_128x128", 128, bf16, 128, 128, {1, 2, 2, 257, 130}, {false, 16}},
    {"D128_fp16_64x64", 128, fp16, 64, 64, {1, 4, 1, 63, 127}, {true, 0}},
};
INSTANTIATE_TEST_SUITE_P(Gpu, Linear, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

} // namespace
