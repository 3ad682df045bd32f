//===- backward_kernels_test.cpp - A fused or a split backward -------------===//
#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "tests/generator/specs.h"

#include <algorithm>
#include <map>

using namespace sagebwd;
using test::kinds_of;
using test::kPasses;
using enum KernelKind;
using Kinds = std::vector<KernelKind>;

namespace {

TEST(Kernels, OfTheBackwardAreFusedOrSplitByTheFamilyOrAGivenTile) {
  AttentionSpec s;
  s.precision = Precision::gradients16, s.deterministic = false;
  const Kinds split = {key_mean, quantize, backward_dkv, backward_dq},
              fused = {key_mean, quantize, backward, round_dq};
  const Arch &ampere = find_arch("sm_80"), &hopper = find_arch("sm_90a");
  const auto kernels = Operation(resolved(s), ampere).kernels(Pass::backward);
  EXPECT_EQ(kinds_of(kernels), fused);
  EXPECT_EQ(kernels[2].tile, *default_fused_tile(resolved(s), ampere));
  EXPECT_EQ(kinds_of(Operation(resolved(s), hopper).kernels(Pass::backward)), fused);
  AttentionSpec int8 = s; // of wgmma, which has no fused one
  int8.precision = Precision::six_of_seven;
  EXPECT_EQ(kinds_of(Operation(resolved(int8), hopper).kernels(Pass::backward)), split);
  const Tiles mma = default_tiles(resolved(s), hopper, Family::mma);
  EXPECT_EQ(kinds_of(Operation(resolved(s), hopper, mma).kernels(Pass::backward)), fused);
  EXPECT_EQ(kinds_of(Operation(resolved(s), hopper, mma).kernels(Pass::forward)),
            (Kinds{key_mean, quantize, forward}));
  // Who names a tile of the split backward means that one.
  for (KernelKind kind : {backward_dq, backward_dkv})
    EXPECT_EQ(
        kinds_of(Operation(resolved(s), ampere, {{kind, default_tile(kind, resolved(s), ampere)}})
                     .kernels(Pass::backward)),
        split);
  const Tiles forward_alone = {{forward, default_tile(forward, resolved(s), ampere)}};
  EXPECT_EQ(kinds_of(Operation(resolved(s), ampere, forward_alone).kernels(Pass::backward)), fused);
}

TEST(Kernels, OfASplitBackwardNeedNoSumsOfDq) {
  AttentionSpec s;
  s.precision = Precision::gradients16, s.deterministic = false;
  s.head_dim = 128;
  const ResolvedSpec spec = resolved(s);
  const Arch &ampere = find_arch("sm_80"), &ada = find_arch("sm_89"); // where it does not fit
  s.gradient_kernels = Backward::fused;
  EXPECT_EQ(Operation(spec, ampere).built(), resolved(s));
  s.deterministic = true, s.gradient_kernels = Backward::split;
  EXPECT_EQ(Operation(spec, ada).built(), resolved(s));
  EXPECT_EQ(Operation(spec, ampere, {{backward_dq, {}}}).built(), resolved(s));
  const Problem p = {1, 2, 1, 256, 256};
  EXPECT_GT(workspace_bytes(Pass::backward, Operation(spec, ampere).built(), p),
            workspace_bytes(Pass::backward, Operation(spec, ada).built(), p));
}

TEST(Kernels, AreFusedByDefaultWhereThatIsFaster) {
  using enum Precision;
  const std::string small = "mma 64x64 w4 s1 b2", large = "mma 64x128 w8 s1 b1";
  const std::map<std::pair<Precision, int>, std::map<std::string, std::string>> fused = {
      {{gradients16, 64},
       {{"sm_80", small},
        {"sm_87", small},
        {"sm_89", small},
        {"sm_90a", small},
        {"sm_100", small},
        {"sm_120", small}}},
      {{gradients16, 128}, // two do not fit in 164 KB, nor on Blackwells in the registers
       {{"sm_80", large}, {"sm_87", large}, {"sm_90a", small}, {"sm_100", large}}},
      {{six_of_seven, 64}, {{"sm_89", large}, {"sm_120", large}}}, // where tensor cores bind
      {{six_of_seven, 128}, {{"sm_89", large}, {"sm_120", large}}},
      {{qk16, 64}, {{"sm_89", large}, {"sm_120", large}}}}; // at 128 99 KB are too few
  for (const auto& [precision, word] : Words<Precision>::all)
    for (int head_dim : {64, 128})
      for (const char* name : {"sm_80", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_120"}) {
        AttentionSpec s;
        s.precision = precision, s.head_dim = head_dim;
        const Arch& arch = find_arch(name);
        const auto of_spec = fused.find({precision, head_dim});
        const bool expected = of_spec != fused.end() && of_spec->second.count(name);
        const bool binds = arch.name == "sm_89" || arch.name == "sm_120";
        EXPECT_EQ(default_tiles(resolved(s), arch, Family::mma).count(backward),
                  expected && binds && precision != gradients16); // its order is free in 16 bits
        s.deterministic = false;
        const Tiles tiles = default_tiles(resolved(s), arch, Family::mma);
        EXPECT_EQ(tiles.count(backward) ? to_string(tiles.at(backward)) : "",
                  expected ? of_spec->second.at(name) : "")
            << word << head_dim << name;
        // The default of sm_90a is its own alone, and not at 64 channels, but where sums are asked
        // for in FP16.
        const bool own = precision == gradients16 && head_dim == 128;
        EXPECT_EQ(default_fused_tile(*resolved(s), arch).has_value(),
                  expected && (arch.name != "sm_90a" || own));
        if (precision == gradients16 && arch.name == "sm_90a") {
          s.dq_sums = DqSums::fp16;
          EXPECT_TRUE(default_fused_tile(*resolved(s), arch));
          s.dq_sums = DqSums::fp32;
        }
        s.group_kv = 64; // dS has one scale for a block's keys
        if (which_int8(precision).dq)
          EXPECT_FALSE(default_tiles(resolved(s), arch, Family::mma).count(backward));
      }
}

TEST(Kernels, AreFusedOrSplitAsTheSpecSays) {
  AttentionSpec s;
  const Arch& hopper = find_arch("sm_90a");
  s.gradient_kernels = Backward::fused;
  const Operation fused(resolved(s), hopper);
  EXPECT_EQ(kinds_of(fused.kernels(Pass::backward)),
            (Kinds{key_mean, quantize, backward, round_dq}));
  EXPECT_EQ(fused.kernels(Pass::backward)[2].tile.family, Family::mma);
  EXPECT_TRUE(orders_dq(fused.built()));
  s.gradient_kernels = Backward::split;
  const Arch& ada = find_arch("sm_89"); // fused by default
  EXPECT_FALSE(Operation(resolved(s), ada).fused());
  EXPECT_TRUE(Operation(resolved(AttentionSpec()), ada).fused());
  // The forward's kernels, and those of a split backward, do not say it in their names.
  for (Pass pass : kPasses)
    for (const KernelSpec& k : Operation(resolved(s), hopper).kernels(pass))
      EXPECT_EQ(k.attention.gradient_kernels, Backward::either) << kernel_name(k);
  const Tiles tile = {{backward, parse_tile("mma 64x128 w8 s1 b1")}};
  test::expect_refusal([&] { Operation(resolved(s), ada, tile); },
                       {"gradient_kernels = split", "contradicts the tile", "backward"});
  s = {};
  s.gradient_kernels = Backward::fused, s.precision = Precision::qk16;
  test::expect_refusal([&] { Operation(resolved(s), ada); },
                       {"gradient_kernels = fused", "sm_89", "leave gradient_kernels out"});
  for (auto [wrong, word] :
       {std::pair{AttentionSpec{.head_dim = 256}, "head dimension 256"},
        {AttentionSpec{.granularity = Granularity::block}, "under 'block'"},
        {AttentionSpec{.precision = Precision::gradients16}, "under 'deterministic'"},
        {AttentionSpec{.precision = Precision::dv16}, "precision 'dv16'"}}) {
    wrong.gradient_kernels = Backward::fused;
    test::expect_refusal([&] { resolved(wrong); },
                         {"gradient_kernels = fused is not supported", word, "leave it out"});
  }
  s = test::with_fp16_sums();
  s.gradient_kernels = Backward::split;
  test::expect_refusal([&] { resolved(s); }, {"dq_sums = fp16", "gradient_kernels = split"});
}

TEST(Kernels, AreFusedOnlyForTheGroupsThatTheyCanHave) {
  const auto expect_refused = [](const AttentionSpec& s, const char* words) {
    const Tiles tiles = {{backward, parse_tile("mma 64x128 w8 s1 b1")}};
    const auto emit_all = [&] {
      for (const KernelSpec& k :
           Operation(resolved(s), find_arch("sm_80"), tiles).kernels(Pass::backward))
        emit(k);
    };
    test::expect_refusal(emit_all, {words});
  };
  AttentionSpec s;
  s.group_kv = 64;
  expect_refused(s, "takes the 128 keys of a quantisation group");
  s = {.granularity = Granularity::block};
  expect_refused(s, "not supported under 'block', where");
  s.deterministic = false;
  expect_refused(s, "not supported under 'block' and precision 'six-of-seven'");
  s = {.precision = Precision::dv16};
  for (bool deterministic : {true, false}) {
    s.deterministic = deterministic;
    expect_refused(s, "the tile that was given for backward means gradient_kernels = fused: leave "
                      "that tile out");
    expect_refused(s, "not supported under precision 'dv16'");
  }
}

TEST(Kernels, ThatSumDqInFp16SayThatInTheirNamesAndKeys) {
  AttentionSpec s = test::with_fp16_sums();
  const Arch& hopper = find_arch("sm_90a");
  const auto kernels = Operation(resolved(s), hopper).kernels(Pass::backward);
  EXPECT_EQ(kinds_of(kernels), (Kinds{key_mean, quantize, backward, round_dq}));
  for (const KernelSpec& k : kernels) {
    EXPECT_EQ(k.attention.dq_sums, DqSums::fp16) << kernel_name(k);
    EXPECT_NE(kernel_name(k).find("_dq_sums_fp16"), std::string::npos) << kernel_name(k);
    EXPECT_EQ(resolved(k.attention), resolved(resolved(k.attention))); // a command can name it
  }
  // The forward is the same one, and a spec's keys name only what is asked for.
  AttentionSpec fp32 = s;
  fp32.dq_sums = DqSums::fp32;
  EXPECT_EQ(Operation(resolved(s), hopper).kernels(Pass::forward),
            Operation(resolved(fp32), hopper).kernels(Pass::forward));
  const auto names_it = [](const KernelSpec& k) {
    const auto fields = labelled(k);
    return std::any_of(fields.begin(), fields.end(),
                       [](const auto& field) { return field.first == "dq_sums"; });
  };
  for (const KernelSpec& k : kernels)
    EXPECT_TRUE(names_it(k)) << kernel_name(k);
  for (const KernelSpec& k : Operation(resolved(fp32), hopper).kernels(Pass::backward))
    EXPECT_FALSE(names_it(k)) << kernel_name(k);
  // Without smoothing nobody needs a mean, but how large keys are.
  s.smooth_k = false;
  EXPECT_EQ(kinds_of(Operation(resolved(s), hopper).kernels(Pass::backward)), kinds_of(kernels));
  EXPECT_EQ(kinds_of(Operation(resolved(s), hopper).kernels(Pass::forward)),
            (Kinds{quantize, forward}));
}

TEST(Kernels, ThatSumDqInFp16AreOfTheFamilyWsAlone) {
  const AttentionSpec s = test::with_fp16_sums();
  for (const char* arch : {"sm_80", "sm_89", "sm_100", "sm_120"})
    for (Pass pass : kPasses)
      test::expect_refusal([&] { Operation(resolved(s), find_arch(arch)).kernels(pass); },
                           {"dq_sums = fp16", arch, "family 'ws' of sm_90a", "leave it out"});
  const Arch& hopper = find_arch("sm_90a");
  const Tiles split = {{backward_dq, default_tile(backward_dq, resolved(s), hopper)}};
  test::expect_refusal([&] { Operation(resolved(s), hopper, split).kernels(Pass::backward); },
                       {"dq_sums = fp16", "sm_90a with these tiles", "leave it out"});
  const Tiles mma = {{backward, parse_tile("mma 64x128 w8 s1 b1")}};
  for (const KernelSpec& k : Operation(resolved(s), hopper, mma).kernels(Pass::backward))
    if (k.kind == backward)
      test::expect_refusal([&] { emit(k); },
                           {"mma 64x128 w8 s1 b1", "adds up dQ in FP32", "the family 'ws' alone"});
}

TEST(Kernels, ThatSumDqInFp16TakeHalfTheMemoryForSums) {
  const Problem p = {1, 2, 1, 4096, 4096};
  AttentionSpec s = test::with_fp16_sums();
  s.gradient_kernels = Backward::fused;
  const size_t fp16 = workspace_bytes(Pass::backward, resolved(s), p);
  s.dq_sums = DqSums::fp32;
  const size_t fp32 = workspace_bytes(Pass::backward, resolved(s), p);
  // Two bytes a value fewer, but a factor a query and what is known of 16 chunks of keys.
  const size_t values = 2 * 4096 * 128, factors = 2 * 4096 * 2, ranges = 16 * 257 * 4;
  EXPECT_LE(fp16, fp32 - 2 * values + factors + ranges + 2 * 256);
  EXPECT_GE(fp16, fp32 - 2 * values + factors + ranges);
}

TEST(Kernels, ThatSumDpInFp16SayThatInTheirNamesAndKeys) {
  for (bool fused : {false, true}) {
    AttentionSpec s = test::with_half_dp();
    s.gradient_kernels = fused ? Backward::fused : Backward::split;
    const Arch& ampere = find_arch("sm_80");
    const auto kernels = Operation(resolved(s), ampere).kernels(Pass::backward);
    EXPECT_EQ(kinds_of(kernels), fused ? (Kinds{key_mean, quantize, backward, round_dq})
                                       : (Kinds{key_mean, quantize, backward_dkv, backward_dq}));
    AttentionSpec fp32 = s;
    fp32.dp_sums = DpSums::fp32;
    const auto others = Operation(resolved(fp32), ampere).kernels(Pass::backward);
    for (size_t i = 0; i < kernels.size(); ++i) {
      const std::string name = kernel_name(kernels[i]);
      if (kernels[i].kind == round_dq) {
        EXPECT_EQ(kernels[i], others[i]);
        continue;
      }
      EXPECT_NE(name.find("_dp_sums_fp16"), std::string::npos) << name;
      EXPECT_EQ(kernel_name(others[i]).find("dp_sums"), std::string::npos);
      EXPECT_NE(emit(kernels[i]).text.find("constexpr bool DP16 = true;"), std::string::npos);
      EXPECT_NE(emit(others[i]).text.find("constexpr bool DP16 = false;"), std::string::npos);
      EXPECT_EQ(resolved(kernels[i].attention), resolved(resolved(kernels[i].attention)));
    }
    EXPECT_EQ(Operation(resolved(s), ampere).kernels(Pass::forward),
              Operation(resolved(fp32), ampere).kernels(Pass::forward));
    s.smooth_k = false; // the mean of the values is needed all the same
    EXPECT_EQ(kinds_of(Operation(resolved(s), ampere).kernels(Pass::backward)), kinds_of(kernels));
  }
}

TEST(Kernels, ThatSumDpInFp16AreOfTheFamilyMmaAlone) {
  const ResolvedSpec s = resolved(test::with_half_dp());
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_100", "sm_120"})
    EXPECT_NO_THROW(Operation(s, find_arch(arch)).kernels(Pass::backward)) << arch;
  const Arch& hopper = find_arch("sm_90a");
  test::expect_refusal([&] { Operation(s, hopper); },
                       {"dp_sums = fp16 is not supported on sm_90a: backward_dkv", "family 'ws'",
                        "the family 'mma' has it", "leave dp_sums out for fp32"});
  AttentionSpec of_wgmma = s;
  of_wgmma.precision = Precision::qk16;
  test::expect_refusal([&] { Operation(resolved(of_wgmma), hopper); },
                       {"dp_sums = fp16 is not supported on sm_90a", "family 'wgmma'"});
  Tiles tiles;
  for (KernelKind kind : tiled_kernels(Pass::backward))
    tiles[kind] = default_tile(kind, s, find_arch("sm_80"));
  EXPECT_NO_THROW(Operation(s, hopper, tiles).kernels(Pass::backward));
  tiles[backward_dq] = parse_tile("wgmma 64x128 w4 s1 b2");
  test::expect_refusal([&] { Operation(s, hopper, tiles); },
                       {"dp_sums = fp16", "sm_90a with these tiles: backward_dq", "family 'wgmma'",
                        "give tiles of that family"});
  test::expect_refusal([&] { emit(tiled_kernel(backward_dq, s, hopper, tiles[backward_dq])); },
                       {"dp_sums 'fp16' is built by the family 'mma' alone"});
}

} // namespace
