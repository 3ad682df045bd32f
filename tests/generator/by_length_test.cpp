//===- by_length_test.cpp - What the length of calls decides ---------------===//
#include "generator/operation.h"
#include "tests/cache/temp_directory.h"
#include "tests/generator/specs.h"

#include "llvm/Support/JSON.h"

#include <cmath>

using namespace sagebwd;
using test::kinds_of;
using enum KernelKind;

namespace {

Problem of_length(int64_t tokens) { return {1, 8, 8, tokens, tokens}; }

/// The fewest tokens of a call of a spec for which two kernels are not faster.
int64_t first_fused(const AttentionSpec& s) {
  int64_t tokens = 1;
  while (split_is_faster(resolved(s), find_arch("sm_89"), of_length(tokens)))
    ++tokens;
  return tokens;
}

/// Times of the backward in bench/results/balance.json, by plan, head dimension, mask and length.
std::map<std::string, double> predicted() {
  const std::string text = test::read_text(SAGEBWD_SOURCE_DIR "/bench/results/balance.json");
  const auto record = llvm::cantFail(llvm::json::parse(text));
  std::map<std::string, double> found;
  for (const llvm::json::Value& value : *record.getAsObject()->getArray("rows")) {
    const llvm::json::Object& row = *value.getAsObject();
    if (*row.getString("gpu") == "RTX 4090")
      found[row.getString("plan")->str() + " " + std::to_string(*row.getInteger("head_dim")) +
            (*row.getBoolean("causal") ? " causal " : " ") +
            std::to_string(*row.getInteger("tokens"))] =
          *row.getObject("predicted")->getObject("backward")->getNumber("ms");
  }
  return found;
}

TEST(ByLength, TheGradientsHaveTwoKernelsWhereTheRecordSaysThatTheyAreFaster) {
  const auto ms = predicted();
  for (const char* plan : {"six-of-seven", "six-of-seven dp_sums=fp16"})
    for (int head_dim : {64, 128})
      for (bool causal : {false, true}) {
        const std::string cell = " " + std::to_string(head_dim) + (causal ? " causal " : " ");
        const auto gain = [&](const std::string& tokens) {
          return ms.at(plan + (" gradient_kernels=split" + cell) + tokens) -
                 ms.at(plan + cell + tokens);
        };
        const double slope = (gain("8192") - gain("1024")) / (8192 - 1024);
        AttentionSpec s = parse_spec(plan);
        s.head_dim = head_dim;
        s.causal = causal ? Causal::top_left : Causal::none;
        EXPECT_NEAR(static_cast<double>(first_fused(s)), 1024 - gain("1024") / slope, 1) << cell;
      }
}

TEST(ByLength, OnlyPlainCallsOfGpusThatTensorCoresBindAreToldApart) {
  const Problem brief = of_length(128);
  const AttentionSpec usual;
  for (const Arch& arch : all_archs())
    EXPECT_EQ(split_is_faster(resolved(usual), arch, brief), arch.is_bound_by_tensor_cores());
  const Arch& ada = find_arch("sm_89");
  for (const char* other :
       {"gradients16", "qk16", "no-deterministic", "gradient_kernels=fused",
        "gradient_kernels=split", "window_left=64", "intervals=1 causal=top-left"})
    EXPECT_FALSE(split_may_be_faster(resolved(parse_spec(other)), ada)) << other;
  // Two kernels are all that these have.
  for (const char* other : {"d256", "sparse_q=128 sparse_kv=128"})
    EXPECT_FALSE(Operation(resolved(parse_spec(other)), ada).of_short_calls()) << other;
}

TEST(ByLength, FewQueriesOnManyKeysCountAsTheirWorkForEachToken) {
  const ResolvedSpec spec = resolved(parse_spec("d64 causal=top-left"));
  const Arch& ada = find_arch("sm_89");
  const auto fused = [&](int64_t batch, int64_t queries, int64_t keys, bool packed = false) {
    AttentionSpec s = spec;
    s.packed = packed;
    const Problem problem = {batch, 8, 8, queries, keys};
    return Operation(resolved(s), ada).for_call(problem).fused();
  };
  EXPECT_FALSE(fused(1, 3586, 3586));
  EXPECT_TRUE(fused(1, 3587, 3587));
  EXPECT_FALSE(fused(1, 1793, 1 << 20));
  EXPECT_TRUE(fused(1, 1800, 1 << 20));
  EXPECT_TRUE(fused(1, int64_t{1} << 62, int64_t{1} << 62));
  EXPECT_TRUE(fused(8, 8 * 4096, 8 * 4096, /*packed=*/true));
  EXPECT_FALSE(fused(8, 8 * 2048, 8 * 2048, /*packed=*/true));
  EXPECT_FALSE(fused(8, 2048, 2048));
}

TEST(ByLength, AnOperationHasTheKernelsOfBoth) {
  const ResolvedSpec spec = resolved({});
  const Arch& ada = find_arch("sm_89");
  const Operation operation(spec, ada);
  const Operation brief = operation.for_call(of_length(512)),
                  lengthy = operation.for_call(of_length(4096));
  EXPECT_EQ(kinds_of(lengthy.kernels(Pass::backward)), kinds_of(operation.kernels(Pass::backward)));
  EXPECT_EQ(kinds_of(brief.kernels(Pass::backward)),
            (std::vector<KernelKind>{key_mean, quantize, backward_dkv, backward_dq}));
  EXPECT_EQ(brief.kernels(Pass::forward), lengthy.kernels(Pass::forward));
  EXPECT_EQ(brief.spec(), spec);
  const auto all = kinds_of(operation.distinct_kernels());
  for (KernelKind kind : {backward, round_dq, backward_dkv, backward_dq})
    EXPECT_EQ(std::count(all.begin(), all.end(), kind), 1) << to_string(kind);
  // Whoever gives a tile has chosen.
  const Tiles given = {{backward, *default_fused_tile(spec, ada)}};
  EXPECT_TRUE(Operation(spec, ada, given).for_call(of_length(512)).fused());
}

} // namespace
