//===- front_test.cpp - NormOf and RoPE of queries and keys -------------------===//
//
// The oracle is FP64, and forms gradients by the formulas of each step: rotation, gain, norm.
//
//===----------------------------------------------------------------------===//
#include "runtime/front_end.h"
#include "tests/gpu/device.h"
#include "tests/gpu/front_cases.h"

#include <cmath>
#include <memory>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// The queries or the keys: what they are given, on the host and on the device.
struct Given {
  int64_t batch, heads, tokens, channels;
  std::vector<float> x, dy, gain, inv_rms, cos, sin;
  DeviceTensor on_x, on_y, on_dx;
  Buffer on_gain, on_inv_rms, on_cos, on_sin, dgain, gain_parts, dinv_rms;
};

class Front : public OnGpu, public testing::WithParamInterface<FrontCase> {
protected:
  const FrontCase& c() const { return GetParam(); }

  static std::vector<float> drawn(int64_t count, std::mt19937& draw, float mean = 0) {
    std::normal_distribution<float> normal(mean, 1);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values)
      x = normal(draw);
    return values;
  }

  std::unique_ptr<Given> given(int64_t heads, int64_t tokens, unsigned seed) const {
    const int64_t b = c().problem.batch, d = c().head_dim;
    std::mt19937 draw(seed);
    std::vector<float> x = drawn(b * heads * tokens * d, draw, 0.3f);
    std::vector<float> dy = drawn(b * heads * tokens * d, draw);
    for (int64_t i = 0; i < d; ++i) // a token of zeros, and one with a channel that is large
      x[i] = 0;
    x.back() = 300;
    for (std::vector<float>* values : {&x, &dy})
      for (float& value : *values)
        value = reference::round_to(c().dtype, value);
    const int64_t angles = std::max(1, (c().batch_tables ? int(b) : 1) * int(tokens) * pairs());
    std::vector<float> cos = drawn(angles, draw), sin = cos;
    for (size_t i = 0; i < cos.size(); ++i)
      sin[i] = 1.2f * std::sin(3 * cos[i]), cos[i] = 1.2f * std::cos(3 * cos[i]);
    std::vector<float> inv_rms = drawn(b * heads * tokens, draw, 2);
    const int64_t gains = (c().gain == GainOf::per_head ? heads : 1) * d;
    std::vector<float> gain = drawn(gains, draw, 1);
    const auto tensor = [&] {
      return DeviceTensor(c().dtype, b, heads, tokens, d, c().layout, kPoison);
    };
    const Attention attention({.head_dim = c().head_dim, .dtype = c().dtype}, 0);
    Problem p = c().problem;
    p.heads = p.heads_kv = heads, p.seq_q = tokens;
    const int64_t parts = front_part_floats(Tokens::queries, attention.spec(), p);
    std::unique_ptr<Given> result(new Given{b,
                                            heads,
                                            tokens,
                                            d,
                                            x,
                                            dy,
                                            gain,
                                            inv_rms,
                                            cos,
                                            sin,
                                            tensor(),
                                            tensor(),
                                            tensor(),
                                            Buffer(gain.size() * 4),
                                            Buffer(inv_rms.size() * 4),
                                            Buffer(cos.size() * 4),
                                            Buffer(sin.size() * 4),
                                            Buffer(gain.size() * 4),
                                            Buffer(size_t(parts) * 4),
                                            Buffer(inv_rms.size() * 4)});
    result->on_x.upload(x);
    result->on_gain.upload(gain), result->on_inv_rms.upload(inv_rms);
    result->on_cos.upload(cos), result->on_sin.upload(sin);
    return result;
  }
  int pairs() const { return c().channels / 2; }

  FrontSide side(const Given& g) const {
    FrontSide side{.x = g.on_x.view(), .y = g.on_y.view(), .normed = c().norm != NormOf::none};
    if (c().gain != GainOf::none)
      side.gain = g.on_gain.as<float>(), side.gain_per_head = c().gain == GainOf::per_head;
    if (c().norm == NormOf::given || c().norm == NormOf::given_per_head)
      side.inv_rms = g.on_inv_rms.as<float>();
    side.inv_rms_per_head = c().norm == NormOf::given_per_head;
    if (c().rope != RopeOf::none)
      side.rope = {g.on_cos.as<float>(), g.on_sin.as<float>(),
                   c().batch_tables ? g.tokens * pairs() : 0, pairs()};
    return side;
  }
  FrontCall call(const Given& q, const Given& k) const {
    return {.problem = c().problem,
            .q = side(q),
            .k = side(k),
            .norm_eps = c().eps,
            .rope_begin = c().begin,
            .rope_channels = c().channels,
            .rope_interleaved = c().rope == RopeOf::interleaved};
  }

  struct Token {
    int64_t batch, head, token;
  };
  template <typename Visit> static void for_tokens(const Given& g, const Visit& visit) {
    for (int64_t b = 0, row = 0; b < g.batch; ++b)
      for (int64_t h = 0; h < g.heads; ++h)
        for (int64_t s = 0; s < g.tokens; ++s, ++row)
          visit(Token{b, h, s}, row);
  }
  double gain(const Given& g, const Token& at, int64_t channel) const {
    return c().gain == GainOf::none
               ? 1
               : g.gain[(c().gain == GainOf::per_head ? at.head : 0) * g.channels + channel];
  }
  /// 1/rms of one token.
  double factor(const Given& g, const Token& at, int64_t row) const {
    switch (c().norm) {
    case NormOf::none:
      return 1;
    case NormOf::given:
      return g.inv_rms[at.batch * g.tokens + at.token];
    case NormOf::given_per_head:
      return g.inv_rms[row];
    case NormOf::own:
      break;
    }
    double sum = 0;
    for (int64_t i = 0; i < g.channels; ++i)
      sum += double{g.x[row * g.channels + i]} * g.x[row * g.channels + i];
    return 1 / std::sqrt(sum / double(g.channels) + double{c().eps});
  }
  /// Each pair (a, b) becomes (a cos - b sin, a sin + b cos), or that of the negative angle.
  void rotate(std::vector<double>& x, const Given& g, const Token& at, double sign) const {
    if (c().rope == RopeOf::none)
      return;
    for (int i = 0; i < pairs(); ++i) {
      const bool halves = c().rope == RopeOf::halves;
      const int first = c().begin + (halves ? i : 2 * i), second = first + (halves ? pairs() : 1);
      const int64_t place = ((c().batch_tables ? at.batch : 0) * g.tokens + at.token) * pairs() + i;
      const double a = x[first], b = x[second], cos = g.cos[place], sin = sign * g.sin[place];
      x[first] = a * cos - b * sin, x[second] = a * sin + b * cos;
    }
  }

  /// Half of the last bit of y, and FP32's errors before it.
  double bound(double y, double size) const {
    const double last = c().dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
    return std::abs(y) * last * 1.01 + size * 3e-6 + 1e-6;
  }
  void expect_forward(const Given& g, const std::vector<float>& y, const char* name) const {
    int wrong = 0;
    for_tokens(g, [&](const Token& at, int64_t row) {
      const double r = factor(g, at, row);
      std::vector<double> n(g.channels);
      double largest = 0;
      for (int64_t i = 0; i < g.channels; ++i) {
        n[i] = g.x[row * g.channels + i] * r * gain(g, at, i);
        largest = std::max(largest, std::abs(n[i]));
      }
      rotate(n, g, at, 1);
      for (int64_t i = 0; i < g.channels; ++i)
        if (!(std::abs(y[row * g.channels + i] - n[i]) <= bound(n[i], largest)) && wrong++ < 3)
          ADD_FAILURE() << name << " head " << at.head << " token " << at.token << " channel " << i
                        << ": " << y[row * g.channels + i] << ", not " << n[i];
    });
    EXPECT_EQ(wrong, 0) << name;
  }
  void expect_gradients(const Given& g, const std::vector<float>& dx, const char* name) const {
    int wrong = 0;
    std::vector<double> dgain(g.gain.size()), sizes(g.gain.size());
    std::vector<float> dinv(g.inv_rms.size());
    for_tokens(g, [&](const Token& at, int64_t row) {
      const double r = factor(g, at, row);
      std::vector<double> dn(g.channels);
      for (int64_t i = 0; i < g.channels; ++i)
        dn[i] = g.dy[row * g.channels + i];
      rotate(dn, g, at, -1);
      double of_r = 0, size = 0, of_r_size = 0; // dr = sum(dn gain x)
      for (int64_t i = 0; i < g.channels; ++i) {
        const double x = g.x[row * g.channels + i];
        of_r += dn[i] * gain(g, at, i) * x, of_r_size += std::abs(dn[i] * gain(g, at, i) * x);
        const size_t place = (c().gain == GainOf::per_head ? at.head : 0) * g.channels + i;
        dgain[place] += dn[i] * x * r, sizes[place] += std::abs(dn[i] * x * r);
      }
      const bool of_mean = c().norm == NormOf::own;
      for (int64_t i = 0; i < g.channels; ++i)
        size = std::max(size, std::abs(r * dn[i] * gain(g, at, i)));
      for (int64_t i = 0; i < g.channels; ++i) {
        const double x = g.x[row * g.channels + i];
        // r = (mean x^2 + eps)^-1/2: dr/dx_i = -r^3 x_i / D
        const double wanted =
            r * dn[i] * gain(g, at, i) - (of_mean ? of_r * r * r * r * x / g.channels : 0);
        const double of_size = size + (of_mean ? of_r_size * r * r * r * std::abs(x) : 0);
        if (!(std::abs(dx[row * g.channels + i] - wanted) <= bound(wanted, of_size)) && wrong++ < 3)
          ADD_FAILURE() << name << " head " << at.head << " token " << at.token << " channel " << i
                        << ": " << dx[row * g.channels + i] << ", not " << wanted;
      }
      if (side(g).inv_rms)
        dinv[row] = static_cast<float>(of_r);
    });
    EXPECT_EQ(wrong, 0) << name;
    Faults faults;
    g.dgain.check_guards("dgain", faults), g.gain_parts.check_guards("parts", faults);
    g.dinv_rms.check_guards("dinv_rms", faults);
    EXPECT_EQ(faults, Faults());
    const std::vector<float> got = g.dgain.download<float>();
    for (size_t i = 0; side(g).gain && i < got.size(); ++i)
      ASSERT_NEAR(got[i], dgain[i], 2e-6 * sizes[i] + 1e-5) << name << " gain " << i;
    const std::vector<float> got_dinv = g.dinv_rms.download<float>();
    for (size_t i = 0; side(g).inv_rms && i < dinv.size(); ++i)
      ASSERT_NEAR(got_dinv[i], dinv[i], 1e-3 + 1e-5 * std::abs(dinv[i])) << name << " 1/rms " << i;
  }

  static FrontSideGradients gradients(const FrontSide& of, const Given& g) {
    return {.dx = g.on_dx.view(),
            .dgain = of.gain ? g.dgain.as<float>() : nullptr,
            .gain_parts = of.gain ? g.gain_parts.as<float>() : nullptr,
            .dinv_rms = of.inv_rms ? g.dinv_rms.as<float>() : nullptr};
  }
};

TEST_P(Front, NearFp64) {
  const Problem& p = c().problem;
  const Attention attention({.head_dim = c().head_dim, .dtype = c().dtype}, 0);
  const auto of_queries = given(p.heads, p.seq_q, 1), of_keys = given(p.heads_kv, p.seq_kv, 2);
  Given &q = *of_queries, &k = *of_keys;
  driver::synchronize();
  front(call(q, k), attention);
  driver::synchronize();
  Faults faults;
  expect_forward(q, q.on_y.download("y of q", faults), "q");
  expect_forward(k, k.on_y.download("y of k", faults), "k");
  EXPECT_EQ(faults, Faults());
  q.on_y.upload(q.dy), k.on_y.upload(k.dy);
  driver::synchronize();
  const FrontCall of = call(q, k);
  std::vector<std::vector<float>> before;
  for (int run = 0; run < 2; ++run) {
    front_gradients({.of = of, .q = gradients(of.q, q), .k = gradients(of.k, k)}, attention);
    driver::synchronize();
    const std::vector<std::vector<float>> found = {
        q.on_dx.download("dx of q", faults), k.on_dx.download("dx of k", faults),
        of.q.gain ? q.dgain.download<float>() : std::vector<float>(),
        of.k.gain ? k.dgain.download<float>() : std::vector<float>()};
    EXPECT_EQ(faults, Faults());
    if (run == 1) {
      EXPECT_EQ(found, before) << "another run has other bits";
    }
    before = found;
  }
  expect_gradients(q, before[0], "q");
  expect_gradients(k, before[1], "k");
}

INSTANTIATE_TEST_SUITE_P(Gpu, Front, testing::ValuesIn(kFrontCases),
                         [](const auto& info) { return std::string(info.param.name); });

} // namespace
