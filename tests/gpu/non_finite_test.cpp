//===- non_finite_test.cpp - NaN and Inf never vanish ----------------------===//
//
// A loss scaler relies on seeing them. They may spread to all that shares their batch and
// key/value head, no further.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <limits>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

class NonFinite : public CaseTest {
protected:
  Problem problem; ///< of two batches or of two key/value heads; two queries share each of these

  /// Element (0, head, token, 33) of a tensor of 150 tokens.
  size_t place(int64_t head, int64_t token) const {
    return (head * 150 + token) * attention->spec()->head_dim + 33;
  }

  /// Non-finite where FP64 is; the clean run's bits outside batch 0, key/value head 0. Heads of
  /// one batch are contiguous, so key/value head 0 comes first.
  void expect_seen(const char* name, const std::vector<float>& got, const std::vector<float>& clean,
                   const std::vector<double>& exact) {
    SCOPED_TRACE(name);
    const size_t reach = got.size() / (problem.batch * problem.heads_kv);
    size_t hidden = 0, leaked = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      hidden += !std::isfinite(exact[i]) && std::isfinite(got[i]);
      leaked += i >= reach && got[i] != clean[i];
    }
    EXPECT_EQ(hidden, 0u) << "elements are finite where FP64's are not";
    EXPECT_EQ(leaked, 0u) << "elements of other heads or batches changed";
  }
};

TEST_P(NonFinite, SeenWhereExactAttentionShowsThem) {
  const AttentionSpec& spec = attention->spec();
  // Under a mask the last query and the first key: all that they could reach is visible.
  const bool causal = spec.causal != Causal::none;
  const int64_t query = causal ? 149 : 70, key = causal ? 0 : 70;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
    problem = value == kInfinity ? Problem{2, 2, 1, 150, 150} : Problem{1, 4, 2, 150, 150};
    const auto clean_in = reference::random_inputs(problem, spec.head_dim, spec.dtype, 1, 3);
    const auto clean = run(*attention, clean_in);
    for (const char tensor : {'q', 'k', 'v', 'o', '-'}) {
      // Products with one infinity are of both signs; V's range has its highest and its lowest.
      if (tensor == '-' && value != kInfinity)
        continue;
      SCOPED_TRACE(std::string("in ") + (tensor == 'o' ? "dout" : std::string(1, tensor)) + ": " +
                   std::to_string(value));
      auto in = clean_in;
      switch (tensor) {
      case 'q':
        in.q[place(1, query)] = value;
        break;
      case 'k':
        in.k[place(0, key)] = value;
        break;
      case 'v':
        in.v[place(0, key)] = value;
        break;
      case '-':
        in.v[place(0, key)] = -value;
        break;
      default:
        in.dout[place(1, query)] = value;
      }
      const auto got = run(*attention, in);
      const auto exact = reference::exact(in, spec);
      expect_seen("out", got.o, clean.o, exact.o);
      expect_seen("lse", got.lse, clean.lse, exact.lse);
      expect_seen("dq", got.dq, clean.dq, exact.dq);
      expect_seen("dk", got.dk, clean.dk, exact.dk);
      expect_seen("dv", got.dv, clean.dv, exact.dv);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, NonFinite,
                         testing::ValuesIn(cases_named({"D128_bf16_Row",
                                                        "D64_bf16_Row_TopLeft",
                                                        "D64_fp16_Block_TopLeft",
                                                        "D128_bf16_Qk16",
                                                        "D128_bf16_Row_Unsmoothed",
                                                        "Mma_D128_bf16_Row64",
                                                        "Mma_D128_bf16_Block",
                                                        "Fused_D64_bf16",
                                                        "FusedWs_D64_bf16",
                                                        "FusedWs_D128_bf16",
                                                        "Fp16Sums_D64_bf16",
                                                        "Fp16Sums_D128_bf16",
                                                        "HalfDp_D64_bf16",
                                                        "HalfDp_D64_fp16_Block_TopLeft",
                                                        "HalfDp_D128_fp16_Gradients16",
                                                        "HalfDp_Fused_D64_bf16_TopLeft",
                                                        "D256_fp16_Row_TopLeft",
                                                        "D512_fp16_Row_TopLeft",
                                                        "D512_fp16_Gradients16",
                                                        "D256_fp16_Gradients16",
                                                        "D72_fp16_Dv16_Unsmoothed",
                                                        "Window_D64_bf16",
                                                        "Window_D80_bf16_TopLeft",
                                                        "Packed_D64_bf16_TopLeft",
                                                        "SmoothQ_D64_bf16_Row_TopLeft",
                                                        "SmoothV_D64_bf16_Row_TopLeft",
                                                        "SmoothQ_D128_bf16_Block_BottomRight"})),
                         case_name);

} // namespace
