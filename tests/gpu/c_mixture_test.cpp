//===- c_mixture_test.cpp - Exact and linear attention through C ------------===//
//
// libsagebwd.so beside the C++ operation, whose results mixture_test.cpp compares with formulas.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/c_arguments.h"
#include "tests/gpu/listed.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Parts = std::vector<std::string>;

class CMixture : public OnGpu {
protected:
  ~CMixture() override { sagebwd_destroy(c); }

  void make(const char* line) {
    attention.emplace(parse_spec(line));
    ASSERT_EQ(sagebwd_create(line, 0, &c), SAGEBWD_OK) << sagebwd_last_error();
  }

  /// The memory of both passes, with what linear attention has.
  struct Call {
    Operands operands;
    DeviceTensor sparse_out;
    Buffer alpha, dalpha, kept_sums;
    ForwardArgs& forward = operands.forward;
    BackwardArgs& backward = operands.backward;

    /// `shares` has no address yet.
    Call(const Attention& attention, const reference::Inputs& in, Layout layout,
         const std::vector<float>& values, Shares shares)
        : operands(attention, in, {.layout = layout}),
          sparse_out(operands.queries(operands.channels)), alpha(values.size() * sizeof(float)),
          dalpha(operands.rows_bytes()),
          kept_sums(shares.keeps_sums ? attention.kept_sums_bytes(in.problem) : 0) {
      alpha.upload(values);
      shares.alpha = alpha.as<float>();
      forward.shares = backward.shares = shares;
      forward.sparse_out = backward.out = sparse_out.view();
      backward.dalpha = dalpha.as<float>();
      if (shares.keeps_sums)
        backward.kept_sums = forward.kept_sums = kept_sums.as<>();
    }

    std::vector<std::vector<uint32_t>> results(bool with_dalpha) const {
      Faults faults;
      const auto found = operands.download(faults);
      const auto sparse = sparse_out.download("sparse_out", faults);
      if (with_dalpha)
        dalpha.check_guards("dalpha", faults);
      EXPECT_EQ(faults, Faults());
      std::vector<std::vector<uint32_t>> bits;
      for (const auto* values : {&found.o, &found.lse, &found.dq, &found.dk, &found.dv, &sparse})
        bits.push_back(bits_of(*values));
      bits.push_back(dalpha.download<uint32_t>());
      return bits;
    }
  };

  sagebwd_status launch(const sagebwd_forward_args& args, const Call& call) {
    return sagebwd_forward(c, &args, call.forward.softmax_scale, call.forward.workspace,
                           call.forward.workspace_bytes, nullptr);
  }
  sagebwd_status launch(const sagebwd_backward_args& args, const Call& call) {
    return sagebwd_backward(c, &args, call.backward.softmax_scale, call.backward.workspace,
                            call.backward.workspace_bytes, nullptr);
  }

  /// Expects that these arguments are refused once they are changed.
  template <typename Args, typename Change>
  void refused(const Call& call, Args args, const Parts& parts, const Change& change) {
    change(args);
    expect_failed(launch(args, call), SAGEBWD_INVALID, parts);
  }

  /// `count` numbers lie where the shares' strides lead.
  void expect_same_bits(const reference::Inputs& in, Layout layout, int64_t count,
                        const Shares& shares, bool with_dalpha) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i)
      values.push_back(static_cast<float>(i * 29 % 64 + 1) / 66);
    Call expected(*attention, in, layout, values, shares),
        found(*attention, in, layout, values, shares);
    if (!with_dalpha)
      expected.backward.dalpha = found.backward.dalpha = nullptr;
    attention->forward(expected.forward);
    attention->backward(expected.backward);
    ASSERT_EQ(launch(for_c(found.forward), found), SAGEBWD_OK) << sagebwd_last_error();
    ASSERT_EQ(launch(for_c(found.backward), found), SAGEBWD_OK) << sagebwd_last_error();
    driver::synchronize();
    const auto bits = found.results(with_dalpha), of_cpp = expected.results(with_dalpha);
    EXPECT_EQ(bits, of_cpp);
    // As memory begins: a gradient that is wanted is written, and no other.
    EXPECT_EQ(bits.back().back() == 0xffffffff, !with_dalpha);
  }

  std::optional<Attention> attention;
  sagebwd_operation* c = nullptr;
};

TEST_F(CMixture, GivesTheSameBitsOfTheComplement) {
  make("d64 sparse_q=64 sparse_kv=64 linear=complement");
  const auto in = listed_inputs(attention->spec(), {2, 4, 2, 150, 200}, 0.4);
  // Three numbers of each head lie two apart, heads 7 and sequences 30.
  expect_same_bits(in, {.bshd = true, .padding = 8}, 60, {nullptr, 30, 7, 2, 64}, true);
}

TEST_F(CMixture, GivesTheSameBitsOfAllKeysWithoutAGradientOfAlpha) {
  make("d64 fp16 sparse_q=128 sparse_kv=64 linear=all");
  const auto in = listed_inputs(attention->spec(), {1, 2, 1, 130, 200}, 0.4);
  // Heads share a number for each query.
  expect_same_bits(in, {}, 130, {nullptr, 0, 0, 1, 1}, false);
}

TEST_F(CMixture, GivesTheSameBitsOfRest) {
  make("d64 sparse_q=64 sparse_kv=64 linear=complement gradients16");
  const auto in = listed_inputs(attention->spec(), {1, 2, 1, 130, 200}, 0.4);
  expect_same_bits(in, {}, 260, {nullptr, 0, 130, 1, 1, /*of_rest=*/true}, true);
}

TEST_F(CMixture, GivesTheSameBitsOfKeptSums) {
  make("d64 sparse_q=64 sparse_kv=64 linear=complement");
  const auto in = listed_inputs(attention->spec(), {1, 2, 1, 130, 200}, 0.4);
  const sagebwd_problem problem = for_c(in.problem);
  size_t bytes = 0;
  ASSERT_EQ(sagebwd_kept_sums_bytes(c, &problem, &bytes), SAGEBWD_OK) << sagebwd_last_error();
  EXPECT_EQ(bytes, attention->kept_sums_bytes(in.problem));
  expect_same_bits(in, {}, 2, {.stride_h = 1, .keeps_sums = true}, true);
}

TEST_F(CMixture, WrongCallsAreRefused) {
  make("d64 sparse_q=64 sparse_kv=64 linear=complement");
  const Call call(*attention, listed_inputs(attention->spec(), {1, 2, 1, 64, 64}, 0.4), {}, {0.5f},
                  {.tokens = 64});
  const sagebwd_forward_args good_forward = for_c(call.forward);
  const sagebwd_backward_args good_backward = for_c(call.backward);
  refused(call, good_forward, {"alpha: the address is null"},
          [](auto& a) { a.shares.alpha = nullptr; });
  refused(call, good_forward, {"shares: tokens is 0"}, [](auto& a) { a.shares.tokens = 0; });
  refused(call, good_forward, {"shares: a stride is -1"}, [](auto& a) { a.shares.stride_b = -1; });
  refused(call, good_forward, {"shares.of_rest = 2"}, [](auto& a) { a.shares.of_rest = 2; });
  refused(call, good_forward, {"shares.keeps_sums = 2"}, [](auto& a) { a.shares.keeps_sums = 2; });
  refused(call, good_forward, {"kept_sums: the address is null", "keeps_sums is set"},
          [](auto& a) { a.shares.keeps_sums = 1; });
  refused(call, good_forward, {"sparse_out: the address is null"},
          [](auto& a) { a.sparse_out.data = nullptr; });
  refused(call, good_forward, {"out and sparse_out share memory"},
          [](auto& a) { a.sparse_out = a.out; });
  refused(call, good_forward, {"k_mean is given", "linear attention"},
          [](auto& a) { a.k_mean = a.lse; });
  refused(call, good_backward, {"alpha: the address is null"},
          [](auto& a) { a.shares = {.tokens = 64}; });
  refused(call, good_backward, {"shares: tokens is -1"}, [](auto& a) { a.shares.tokens = -1; });
  refused(call, good_backward, {"alpha and dalpha share memory", "writes dalpha"},
          [&](auto& a) { a.dalpha = call.alpha.as<float>(); });
}

TEST_F(CMixture, SpecsWithoutLinearAttentionTakeNone) {
  make("d64 sparse_q=64 sparse_kv=64");
  const Call call(*attention, listed_inputs(attention->spec(), {1, 2, 1, 64, 64}, 0.4), {}, {0.5f},
                  {});
  sagebwd_forward_args good_forward = for_c(call.forward);
  sagebwd_backward_args good_backward = for_c(call.backward);
  good_forward.shares = good_backward.shares = {};
  good_forward.sparse_out = {}, good_backward.dalpha = nullptr;
  const auto alpha = call.forward.shares.alpha;
  const char* why = "the spec has no linear attention";
  refused(call, good_forward, {"alpha is given", why}, [&](auto& a) { a.shares.alpha = alpha; });
  refused(call, good_forward, {"shares: a stride is 5", why},
          [](auto& a) { a.shares.stride_h = 5; });
  refused(call, good_forward, {"sparse_out is given", why}, [](auto& a) { a.sparse_out = a.out; });
  refused(call, good_forward, {"shares.keeps_sums is set", why},
          [](auto& a) { a.shares.keeps_sums = 1; });
  refused(call, good_forward, {"kept_sums is given", why}, [](auto& a) { a.kept_sums = a.lse; });
  const sagebwd_problem sizes = good_forward.problem;
  expect_failed(sagebwd_kept_sums_bytes(c, &sizes, nullptr), SAGEBWD_INVALID, {why});
  refused(call, good_backward, {"alpha is given", why}, [&](auto& a) { a.shares.alpha = alpha; });
  refused(call, good_backward, {"shares: a stride is 7", why},
          [](auto& a) { a.shares.stride_s = 7; });
  refused(call, good_backward, {"dalpha is given", why},
          [&](auto& a) { a.dalpha = call.dalpha.as<float>(); });
}

} // namespace
