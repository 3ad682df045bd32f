//===- mixture_test.cpp - Exact and linear attention as one operation -------===//
//
// Both passes against SLA2's formulas (arXiv 2602.12675, Algorithms 2 and 3) in FP64, in which
// every weight of linear attention is formed for itself, without sums over blocks.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/operation.h"

#include <algorithm>
#include <cmath>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Exact = std::vector<double>;

struct MixtureCase {
  const char* name;
  const char* spec;
  Problem problem;
  Layout layout;
  int tokens;           ///< that share an alpha: 1, or those of a block
  bool of_rest = false; ///< Shares::of_rest
};

struct Results {
  Exact out, sparse, dq, dk, dv, dalpha;
};

class Mixture : public OnGpu, public testing::WithParamInterface<MixtureCase> {
protected:
  const MixtureCase& of_case = GetParam();
  const AttentionSpec spec = *resolved(parse_spec(of_case.spec));
  const Problem p = of_case.problem;
  const int64_t d = spec.head_dim, group = p.heads / p.heads_kv;
  const int64_t lists = list_blocks(Tokens::queries, spec, p);
  const int64_t blocks = list_blocks(Tokens::keys, spec, p), words = list_words(spec, p);
  const int64_t shares = ceil_div(p.seq_q, of_case.tokens);
  const double scale = 1 / std::sqrt(static_cast<float>(d));
  std::mt19937 draw{5};
  reference::Inputs in;
  std::vector<uint32_t> bits;
  std::vector<float> alpha; ///< of each head and share, or rest
  Faults faults;

  std::vector<float> drawn(int64_t count, float size = 1, float offset = 0) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values)
      x = reference::round_to(spec.dtype, offset + size * normal(draw));
    return values;
  }

  void SetUp() override {
    OnGpu::SetUp();
    in.problem = p, in.head_dim = static_cast<int>(d);
    in.q = drawn(p.batch * p.heads * p.seq_q * d, 1.5f), in.dout = drawn(in.q.size());
    in.k = drawn(p.batch * p.heads_kv * p.seq_kv * d, 1.5f, 0.5f), in.v = drawn(in.k.size());
    bits.resize(static_cast<size_t>(p.batch * p.heads * lists * words));
    for (int64_t list = 0; list < p.batch * p.heads * lists; ++list)
      for (int64_t block = 0; block < blocks; ++block)
        // The first list is empty, the second has all.
        if (list == 1 || (list > 0 && draw() % 3 == 0))
          bits[list * words + block / 32] |= 1u << block % 32;
    // lse is near the logarithm of the listed keys' number plus half of the scores' variance.
    std::uniform_real_distribution<float> uniform(of_case.of_rest ? 4.0f : 0.1f,
                                                  of_case.of_rest ? 9.0f : 0.9f);
    alpha.resize(static_cast<size_t>(p.heads * shares));
    for (float& x : alpha)
      x = uniform(draw);
  }

  bool lists_block(int64_t list, int64_t block) const {
    return bits[list * words + block / 32] >> block % 32 & 1;
  }
  Exact phi(const float* row, const double* mean) const {
    Exact x(static_cast<size_t>(d));
    double sum = 0;
    for (int64_t c = 0; c < d; ++c)
      sum += x[c] = std::exp(row[c] - (mean ? mean[c] : 0));
    for (double& value : x)
      value /= sum;
    return x;
  }
  /// Adds x's gradient by the softmax's.
  void add_through_phi(double* to, const Exact& f, const Exact& df) const {
    double inner = 0;
    for (int64_t c = 0; c < d; ++c)
      inner += f[c] * df[c];
    for (int64_t c = 0; c < d; ++c)
      to[c] += f[c] * (df[c] - inner);
  }

  Results expected() const {
    Results r{Exact(in.q.size()), Exact(in.q.size()), Exact(in.q.size()),
              Exact(in.k.size()), Exact(in.k.size()), Exact(p.batch * p.heads * p.seq_q)};
    for (int64_t kv = 0; kv < p.batch * p.heads_kv; ++kv) {
      const float *k = &in.k[kv * p.seq_kv * d], *v = &in.v[kv * p.seq_kv * d];
      Exact mean(static_cast<size_t>(d)), dmean(static_cast<size_t>(d));
      for (int64_t key = 0; key < p.seq_kv; ++key)
        for (int64_t c = 0; c < d; ++c)
          mean[c] += double{k[key * d + c]} / static_cast<double>(p.seq_kv);
      std::vector<Exact> g, dg(static_cast<size_t>(p.seq_kv), Exact(static_cast<size_t>(d)));
      for (int64_t key = 0; key < p.seq_kv; ++key)
        g.push_back(phi(k + key * d, spec.smooth_k ? mean.data() : nullptr));
      for (int64_t h = 0; h < group; ++h)
        add_head(r, kv * group + h, kv, g, dg);
      Exact linear(static_cast<size_t>(p.seq_kv * d));
      for (int64_t key = 0; key < p.seq_kv; ++key) {
        add_through_phi(&linear[key * d], g[key], dg[key]);
        for (int64_t c = 0; c < d; ++c)
          dmean[c] += linear[key * d + c] / static_cast<double>(p.seq_kv);
      }
      for (int64_t i = 0; i < p.seq_kv * d; ++i)
        r.dk[kv * p.seq_kv * d + i] += linear[i] - (spec.smooth_k ? dmean[i % d] : 0);
    }
    return r;
  }

  void add_head(Results& r, int64_t head, int64_t kv, const std::vector<Exact>& g,
                std::vector<Exact>& dg) const {
    const float *k = &in.k[kv * p.seq_kv * d], *v = &in.v[kv * p.seq_kv * d];
    const auto dot = [&](const auto* a, const auto* b) {
      double sum = 0;
      for (int64_t c = 0; c < d; ++c)
        sum += double{a[c]} * double{b[c]};
      return sum;
    };
    for (int64_t query = 0; query < p.seq_q; ++query) {
      const int64_t row = (head * p.seq_q + query) * d, list = query / spec.sparse_q + head * lists;
      const float *q = &in.q[row], *dout = &in.dout[row];
      const Exact f = phi(q, nullptr);
      Exact e(static_cast<size_t>(p.seq_kv)), w(e.size());
      double all = 0, u = 0;
      bool nothing = true, everything = spec.linear == LinearKeys::complement;
      for (int64_t key = 0; key < p.seq_kv; ++key) {
        const bool listed = lists_block(list, key / spec.sparse_kv);
        nothing &= !listed, everything &= listed;
        if (listed)
          all += e[key] = std::exp(scale * dot(q, k + key * d));
        if (!listed || spec.linear == LinearKeys::all)
          u += w[key] = dot(f.data(), g[key].data());
      }
      const double given = alpha[head % p.heads * shares + query / of_case.tokens];
      const double a = nothing           ? 0
                       : everything      ? 1
                       : of_case.of_rest ? all / (all + std::exp(given))
                                         : given;
      Exact exact(static_cast<size_t>(d)), linear(exact.size());
      for (int64_t key = 0; key < p.seq_kv; ++key) {
        e[key] /= nothing ? 1 : all, w[key] /= everything ? 1 : u;
        for (int64_t c = 0; c < d; ++c)
          exact[c] += e[key] * v[key * d + c], linear[c] += w[key] * v[key * d + c];
      }
      double of_exact = 0, of_linear = 0;
      for (int64_t c = 0; c < d; ++c) {
        r.sparse[row + c] = exact[c];
        r.out[row + c] = a * exact[c] + (1 - a) * linear[c];
        of_exact += dout[c] * exact[c], of_linear += dout[c] * linear[c];
      }
      const double dalpha = nothing || everything ? 0 : of_exact - of_linear;
      const double dlse = of_case.of_rest ? dalpha * a * (1 - a) : 0;
      r.dalpha[head * p.seq_q + query] = of_case.of_rest ? -dlse : dalpha;
      Exact df(exact.size());
      for (int64_t key = 0; key < p.seq_kv; ++key) {
        const double dv = dot(dout, v + key * d);
        const double ds = scale * e[key] * (a * (dv - of_exact) + dlse);
        const double dw = everything || w[key] == 0 ? 0 : (1 - a) * (dv - of_linear) / u;
        for (int64_t c = 0; c < d; ++c) {
          r.dq[row + c] += ds * k[key * d + c];
          r.dk[(kv * p.seq_kv + key) * d + c] += ds * q[c];
          r.dv[(kv * p.seq_kv + key) * d + c] += (a * e[key] + (1 - a) * w[key]) * dout[c];
          df[c] += dw * g[key][c];
          dg[key][c] += dw * f[c];
        }
      }
      add_through_phi(&r.dq[row], f, df);
    }
  }

  static void expect_near(const std::vector<float>& values, const Exact& exact, double limit,
                          const char* what) {
    ASSERT_EQ(values.size(), exact.size()) << what;
    double error = 0, size = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      ASSERT_TRUE(std::isfinite(values[i])) << what << " " << i;
      error += (values[i] - exact[i]) * (values[i] - exact[i]), size += exact[i] * exact[i];
    }
    EXPECT_GT(size, 0) << what;
    EXPECT_LE(std::sqrt(error / size), limit) << what;
  }

  /// The memory of both passes, with what linear attention has.
  struct Call {
    Operands operands;
    DeviceTensor sparse_out;
    Buffer alpha, dalpha;
    Call(const Mixture& test, const Attention& attention)
        : operands(attention, test.in, {.layout = test.of_case.layout, .row_bits = test.bits}),
          sparse_out(operands.queries(operands.channels)), alpha(test.alpha.size() * sizeof(float)),
          dalpha(operands.rows_bytes()) {
      alpha.upload(test.alpha);
      ForwardArgs& forward = operands.forward;
      BackwardArgs& backward = operands.backward;
      forward.shares = {alpha.as<float>(),   0, test.shares, 1, test.of_case.tokens,
                        test.of_case.of_rest};
      backward.shares = forward.shares;
      forward.sparse_out = sparse_out.view();
      if (!test.of_case.of_rest)
        backward.out = forward.sparse_out;
      backward.dalpha = dalpha.as<float>();
    }
  };
};

TEST_P(Mixture, BothPassesAreTheFormulas) {
  Attention attention(spec, 0);
  Call call(*this, attention);
  attention.forward(call.operands.forward);
  attention.backward(call.operands.backward);
  driver::synchronize();
  const auto found = call.operands.download(faults);
  const auto sparse = call.sparse_out.download("sparse_out", faults);
  const auto dalpha = call.dalpha.download<float>();
  call.dalpha.check_guards("dalpha", faults);
  EXPECT_EQ(faults, Faults());
  const Results exact = expected();
  expect_near(found.o, exact.out, 0.03, "out");
  expect_near(sparse, exact.sparse, 0.03, "sparse_out");
  expect_near(found.dq, exact.dq, 0.05, "dq");
  expect_near(found.dk, exact.dk, 0.05, "dk");
  expect_near(found.dv, exact.dv, 0.03, "dv");
  expect_near(dalpha, exact.dalpha, 0.03, "dalpha");
}

/// What is left is not hidden by the error of INT8 products.
TEST_P(Mixture, WithoutAShareItIsLinearAttention) {
  Attention attention(spec, 0);
  std::fill(alpha.begin(), alpha.end(), of_case.of_rest ? 200.0f : 0.0f);
  for (int64_t list = 0; list < p.batch * p.heads * lists; ++list)
    bits[list * words] &= ~1u; // no list has all blocks
  Call call(*this, attention);
  attention.forward(call.operands.forward);
  attention.backward(call.operands.backward);
  driver::synchronize();
  const auto found = call.operands.download(faults);
  EXPECT_EQ(faults, Faults());
  const Results exact = expected();
  expect_near(found.o, exact.out, 0.005, "out");
  expect_near(found.dq, exact.dq, 0.008, "dq");
  expect_near(found.dk, exact.dk, 0.008, "dk");
  expect_near(found.dv, exact.dv, 0.005, "dv");
}

/// The backward reads them, and forms none that would take the place of others.
TEST_P(Mixture, KeptSumsGiveTheSameBits) {
  Attention attention(spec, 0);
  Call plain(*this, attention), keeping(*this, attention);
  Buffer kept(attention.kept_sums_bytes(p));
  ForwardArgs& forward = keeping.operands.forward;
  BackwardArgs& backward = keeping.operands.backward;
  forward.shares.keeps_sums = backward.shares.keeps_sums = true;
  backward.kept_sums = forward.kept_sums = kept.as<>();
  for (Call* call : {&plain, &keeping}) {
    attention.forward(call->operands.forward);
    attention.backward(call->operands.backward);
  }
  driver::synchronize();
  kept.check_guards("kept_sums", faults);
  const auto found = keeping.operands.download(faults), wanted = plain.operands.download(faults);
  EXPECT_EQ(faults, Faults());
  EXPECT_EQ(found.o, wanted.o);
  EXPECT_EQ(found.dq, wanted.dq);
  EXPECT_EQ(found.dk, wanted.dk);
  EXPECT_EQ(found.dv, wanted.dv);
  EXPECT_EQ(keeping.dalpha.download<uint32_t>(), plain.dalpha.download<uint32_t>());

  kept.upload(std::vector<std::byte>(attention.kept_sums_bytes(p)));
  attention.backward(backward);
  driver::synchronize();
  EXPECT_NE(keeping.operands.download(faults).dq, wanted.dq);
}

TEST_P(Mixture, AnInvalidListIsNaN) {
  Attention attention(spec, 0);
  bits[words - 1] |= 1u << 31;
  Call call(*this, attention);
  attention.forward(call.operands.forward);
  attention.backward(call.operands.backward);
  driver::synchronize();
  const auto out = call.operands.out.download("out", faults);
  for (int64_t i = 0; i < p.seq_q * d; ++i)
    ASSERT_EQ(std::isnan(out[i]), i / d < spec.sparse_q) << i;
  // No sum over queries may have what a list that names nothing would give.
  const auto dalpha = call.dalpha.download<float>();
  for (int64_t i = 0; i < p.seq_q; ++i)
    ASSERT_TRUE(i < spec.sparse_q ? dalpha[i] == 0 : std::isfinite(dalpha[i])) << i;
}

TEST_P(Mixture, WrongCallsAreRefused) {
  Attention attention(spec, 0);
  Call call(*this, attention);
  const auto expect_refused = [&](const auto& change, const char* why) {
    ForwardArgs forward = call.operands.forward;
    change(forward);
    try {
      attention.forward(forward);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  expect_refused([](auto& a) { a.shares.alpha = nullptr; }, "alpha: the address is null");
  expect_refused([](auto& a) { a.shares.tokens = 0; }, "tokens is 0");
  expect_refused([](auto& a) { a.shares.stride_h = -1; }, "strides are 0 or more");
  expect_refused([](auto& a) { a.sparse_out.data = nullptr; }, "sparse_out: the address is null");
  expect_refused([](auto& a) { a.sparse_out = a.out; }, "share memory");
  expect_refused([](auto& a) { a.shares.keeps_sums = true; }, "kept_sums: the address is null");
  expect_refused([](auto& a) { a.kept_sums = a.workspace; }, "keeps_sums is not set");
  expect_refused(
      [](auto& a) {
        a.shares.keeps_sums = true;
        a.kept_sums = static_cast<std::byte*>(a.workspace) + 4;
      },
      "aligned to 16");
  expect_refused(
      [](auto& a) {
        a.shares.keeps_sums = true;
        a.kept_sums = a.workspace;
      },
      "kept_sums and the workspace share memory");
  expect_refused([](auto& a) { a.k_mean = reinterpret_cast<const float*>(0x1000); },
                 "k_mean is given");
}

const MixtureCase kCases[] = {
    {"D64_complement",
     "d64 sparse_q=64 sparse_kv=64 linear=complement",
     {2, 4, 2, 140, 200},
     {true, 8},
     64},
    {"D64_fp16_all", "d64 fp16 sparse_q=128 sparse_kv=64 linear=all", {1, 2, 1, 257, 330}, {}, 1},
    {"D64_plain_keys",
     "d64 sparse_q=64 sparse_kv=64 linear=complement no-smooth_k gradients16",
     {1, 2, 2, 130, 200},
     {false, 16},
     64},
    {"D128_complement",
     "d128 sparse_q=128 sparse_kv=64 linear=complement qk16",
     {1, 2, 1, 384, 200},
     {},
     128},
    {"D64_rest",
     "d64 sparse_q=64 sparse_kv=64 linear=complement",
     {1, 4, 2, 140, 200},
     {true, 8},
     1,
     /*of_rest=*/true},
    {"D128_fp16_rest_all",
     "d128 fp16 sparse_q=64 sparse_kv=128 linear=all gradients16",
     {1, 2, 1, 130, 260},
     {},
     64,
     /*of_rest=*/true},
};
INSTANTIATE_TEST_SUITE_P(Gpu, Mixture, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

} // namespace
