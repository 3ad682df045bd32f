//===- refusals_test.cpp - What is refused, and how it says so -------------===//
#include "tests/gpu/operation.h"

#include <functional>
#include <limits>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class Arguments : public OnGpu {
protected:
  static constexpr int kHeadDim = 64;

  void* shifted(void* pointer, int bytes) { return static_cast<char*>(pointer) + bytes; }

  /// Expects a SpecError that says all of `parts`, and that nothing was launched.
  template <typename Call> void expect_refused(Call call, const std::vector<std::string>& parts) {
    SCOPED_TRACE(parts.front());
    try {
      call();
      ADD_FAILURE() << "not refused";
    } catch (const SpecError& error) {
      for (const std::string& part : parts)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    driver::synchronize();
  }
};

TEST_F(Arguments, RefusalsNameTheValue) {
  Attention attention({kHeadDim});
  const Problem problem{1, 4, 2, 100, 90};
  Operands operands(attention, reference::random_inputs(problem, kHeadDim, DType::bf16, 1, 0));
  const auto forward = [&](const std::vector<std::string>& parts,
                           const std::function<void(ForwardArgs&)>& change) {
    expect_refused(
        [&] {
          ForwardArgs args = operands.forward;
          change(args);
          attention.forward(args);
        },
        parts);
  };
  const auto backward = [&](const std::vector<std::string>& parts,
                            const std::function<void(BackwardArgs&)>& change) {
    expect_refused(
        [&] {
          BackwardArgs args = operands.backward;
          change(args);
          attention.backward(args);
        },
        parts);
  };
  const std::string bytes = std::to_string(operands.forward.workspace_bytes);
  const std::string fewer = std::to_string(operands.forward.workspace_bytes - 1);
  const std::string backward_bytes = std::to_string(operands.backward.workspace_bytes);

  forward({"q:", "16 bytes"}, [&](auto& a) { a.q.data = shifted(a.q.data, 8); });
  forward({"v:", "null"}, [](auto& a) { a.v.data = nullptr; });
  forward({"out:", "16 bytes"}, [&](auto& a) { a.out.data = shifted(a.out.data, 2); });
  forward({"lse:", "null"}, [](auto& a) { a.lse = nullptr; });
  forward({"k:", "token stride is 68"}, [](auto& a) { a.k.stride_s = 68; });
  forward({"k:", "head stride is 6401"}, [](auto& a) { a.k.stride_h = 6401; });
  forward({"lse:", "4 bytes"}, [&](auto& a) { a.lse = static_cast<float*>(shifted(a.lse, 1)); });
  forward({"out:", "token stride is 0", "written"}, [](auto& a) { a.out.stride_s = 0; });
  forward({"v:", "token stride is -64", "0 or more"}, [](auto& a) { a.v.stride_s = -64; });
  forward({"out:", "token stride is 56", "written"}, [](auto& a) { a.out.stride_s = 56; });
  forward({"out:", "head stride is 0"}, [](auto& a) { a.out.stride_h = 0; });
  forward({"key/value heads = 0"}, [](auto& a) { a.problem.heads_kv = 0; });
  forward({"workspace", fewer, bytes}, [](auto& a) { --a.workspace_bytes; });
  forward({"workspace", "256"}, [](auto& a) { a.workspace = nullptr; });
  forward({"workspace", "256"}, [&](auto& a) { a.workspace = shifted(a.workspace, 64); });
  forward({"softmax_scale = 9e-21", "0 or at least 1e-20"},
          [](auto& a) { a.softmax_scale = 9e-21f; });
  forward({"softmax_scale = 9.8", "e-45", "1e-20"}, [](auto& a) { a.softmax_scale = 1e-44f; });
  forward({"softmax_scale = -9e-21"}, [](auto& a) { a.softmax_scale = -9e-21f; });
  forward({"softmax_scale = ", "nan"}, [](auto& a) { a.softmax_scale = NAN; });
  forward({"value_dim = 32 with head_dim = ", "pad v"}, [](auto& a) { a.value_dim = 32; });
  forward({"value_dim = 36", "multiple of 8"}, [](auto& a) { a.value_dim = 36; });
  forward({"value_dim = 256", "pad q and k"}, [](auto& a) { a.value_dim = 256; });
  forward({"softmax_scale = inf"}, [](auto& a) { a.softmax_scale = INFINITY; });
  const int32_t first[] = {0, 100};
  forward({"packing.first_queries is given", "a spec that is packed"},
          [&](auto& a) { a.packing.first_queries = first; });
  forward({"packing.lengths_kv is given"}, [&](auto& a) { a.packing.lengths_kv = first; });
  forward({"packing.apart is given"}, [](auto& a) { a.packing.apart = true; });
  forward({"heads = 3", "key/value heads = 2"}, [](auto& a) { a.problem.heads = 3; });
  forward({"query length = 0"}, [](auto& a) { a.problem.seq_q = 0; });
  forward({"key length = -1"}, [](auto& a) { a.problem.seq_kv = -1; });
  forward({"batch = 16777217"}, [](auto& a) { a.problem.batch = (1 << 24) + 1; });

  backward({"dout:", "16 bytes"}, [&](auto& a) { a.dout.data = shifted(a.dout.data, 4); });
  backward({"dk:", "token stride is 70"}, [](auto& a) { a.dk.stride_s = 70; });
  backward({"dlse:", "4 bytes"}, [&](auto& a) {
    a.dlse = static_cast<const float*>(shifted(const_cast<float*>(a.lse), 2));
  });
  backward({"dv:", "head stride is 0"}, [](auto& a) { a.dv.stride_h = 0; });
  backward({"lse:", "null"}, [](auto& a) { a.lse = nullptr; });
  backward({"workspace", "1 bytes", backward_bytes}, [](auto& a) { a.workspace_bytes = 1; });
  backward({"softmax_scale = -inf"}, [](auto& a) { a.softmax_scale = -INFINITY; });
  backward({"heads = 5"}, [](auto& a) { a.problem.heads = 5; });

  // Refused calls launched nothing: the outputs are as they were.
  for (const float x : operands.lse.download<float>())
    ASSERT_TRUE(std::isnan(x));
}

TEST_F(Arguments, SpecsAndTilesAreChecked) {
  expect_refused([] { Attention attention({90}); }, {"head dimension 90", "32 to 512"});
  AttentionSpec groups;
  groups.group_q = 32;
  expect_refused([&] { Attention attention(groups); }, {"group_q = 32"});

  const TileConfig three = {Family::mma, 48, 64, 3, 1, 1};
  Attention attention({kHeadDim}, 0, Tiles{{KernelKind::backward_dq, three}});
  expect_refused([&] { attention.warmup(); }, {"w3", "backward_dq"});
}

TEST_F(Arguments, StridesOfSingleDimensionsDoNotMatter) {
  Attention attention({kHeadDim});
  const Problem problem{1, 1, 1, 50, 1};
  const auto in = reference::random_inputs(problem, kHeadDim, DType::bf16, 1, 0);
  const auto expected = run(attention, in);
  Operands operands(attention, in);
  operands.forward.k.stride_s = operands.forward.q.stride_h = 3;
  operands.forward.out.stride_b = -1;
  attention.forward(operands.forward);
  driver::synchronize();
  Faults faults;
  EXPECT_EQ(operands.out.download("out", faults), expected.o);
  EXPECT_EQ(faults, Faults());
}

TEST_F(Arguments, UnknownGpusAreNamed) {
  try {
    Attention attention({kHeadDim}, 1000);
    ADD_FAILURE() << "not refused";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos) << error.what();
  }
}

} // namespace
