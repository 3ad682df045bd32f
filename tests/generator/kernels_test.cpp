//===- kernels_test.cpp - Which kernels an operation needs -----------------===//
#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "tests/generator/specs.h"

#include <map>
#include <set>

using namespace sagebwd;
using test::kinds_of;
using test::kPasses;
using enum KernelKind;
using Kinds = std::vector<KernelKind>;

namespace {

Kinds kinds_for(Pass pass, Precision precision, bool smooth_k) {
  AttentionSpec s;
  s.precision = precision, s.smooth_k = smooth_k;
  return kinds_of(Operation(resolved(s), find_arch("sm_80")).kernels(pass));
}

TEST(Kernels, OfTheForwardHaveKeyMeanOnlyForSmoothedInt8Scores) {
  EXPECT_EQ(kinds_for(Pass::forward, Precision::six_of_seven, true),
            (Kinds{key_mean, quantize, forward}));
  EXPECT_EQ(kinds_for(Pass::forward, Precision::six_of_seven, false), (Kinds{quantize, forward}));
  for (bool smooth_k : {false, true}) // S reads Q and K themselves
    EXPECT_EQ(kinds_for(Pass::forward, Precision::qk16, smooth_k), (Kinds{quantize, forward}));
}

TEST(Kernels, OfTheBackwardAreTheSameUnderEveryPrecision) {
  const Kinds rest = {quantize, backward_dkv, backward_dq};
  Kinds smooth = {key_mean};
  smooth.insert(smooth.end(), rest.begin(), rest.end());
  for (const auto& [precision, name] : Words<Precision>::all) {
    EXPECT_EQ(kinds_for(Pass::backward, precision, true), smooth);
    EXPECT_EQ(kinds_for(Pass::backward, precision, false), rest);
  }
}

TEST(Kernels, OfSmoothedQueriesAreOfMmaWithOneMoreInEachPass) {
  AttentionSpec s;
  s.smooth_q = true;
  for (const char* arch : {"sm_80", "sm_90a"})
    for (Pass pass : kPasses) {
      const auto kernels = Operation(resolved(s), find_arch(arch)).kernels(pass);
      const Kinds of_forward = {key_mean, quantize, mean_scores, forward},
                  of_backward = {key_mean, quantize, mean_scores, backward_dkv, backward_dq};
      EXPECT_EQ(kinds_of(kernels), pass == Pass::forward ? of_forward : of_backward);
      for (const KernelSpec& kernel : kernels)
        EXPECT_EQ(kernel.tile.family, Family::mma) << kernel_name(kernel);
    }
  const Arch& hopper = find_arch("sm_90a");
  for (Family family : {Family::wgmma, Family::ws}) {
    AttentionSpec plain = *resolved(s);
    plain.smooth_q = false;
    const TileConfig tile = default_tile(forward, plain, hopper, family);
    EXPECT_TRUE(objection(forward, plain, tile, hopper).empty());
    EXPECT_NE(objection(forward, resolved(s), tile, hopper).find("smooth_q"), std::string::npos);
  }
  for (const TileConfig& tile : tiles_worth_trying(forward, resolved(s), hopper))
    EXPECT_EQ(tile.family, Family::mma);
}

/// So the others are those that a process has already, and calls take the same tuning records.
TEST(Kernels, OfMaxLogitsAreOthersInTheForwardAlone) {
  std::vector<AttentionSpec> specs(6);
  specs[1].packed = specs[2].smooth_q = true;
  specs[3].sparse_q = specs[3].sparse_kv = 128;
  specs[4].mask = "q >= k", specs[5].score = "s / 2.0";
  for (const AttentionSpec& spec : specs)
    for (const char* name : {"sm_80", "sm_90a"}) {
      const Arch& arch = find_arch(name);
      const Operation plain(resolved(spec), arch);
      AttentionSpec with = spec;
      with.max_logits = true;
      const Operation given(resolved(with), arch);
      EXPECT_EQ(given.spec().as_in_records(), plain.spec());
      for (Pass pass : kPasses) {
        const auto of_plain = plain.kernels(pass), of_given = given.kernels(pass);
        ASSERT_EQ(of_given.size(), of_plain.size());
        for (size_t i = 0; i < of_given.size(); ++i) {
          const std::string found = kernel_name(of_given[i]);
          EXPECT_EQ(of_given[i].tile, of_plain[i].tile) << found;
          EXPECT_EQ(found == kernel_name(of_plain[i]), of_given[i].kind != forward) << found;
          EXPECT_EQ(found.find("max_logits") != std::string::npos, of_given[i].kind == forward);
          EXPECT_EQ(of_plain[i].attention.max_logits, false);
        }
      }
      EXPECT_EQ(parse_spec(to_string(*given.spec())), *given.spec());
    }
  EXPECT_EQ(to_string(AttentionSpec()).find("max_logits"), std::string::npos);
  AttentionSpec mixed;
  mixed.sparse_q = mixed.sparse_kv = 128, mixed.linear = LinearKeys::all, mixed.max_logits = true;
  test::expect_refusal([&] { resolved(mixed); }, {"linear = all", "with max_logits", "leave one"});
}

TEST(Kernels, AreTunedWhereTheyAreLaunched) {
  AttentionSpec s;
  s.precision = Precision::gradients16, s.deterministic = false;
  const Arch& ampere = find_arch("sm_80");
  EXPECT_EQ(Operation(resolved(s), ampere).tunable_kernels(), (Kinds{forward}));
  s.precision = Precision::qk16;
  EXPECT_EQ(Operation(resolved(s), find_arch("sm_90a")).tunable_kernels(), tiled_kernels());
  EXPECT_EQ(Operation(resolved(AttentionSpec()), ampere).tunable_kernels(), tiled_kernels());
}

TEST(Kernels, CarryPassArchitectureAndTheirTile) {
  const Arch& arch = find_arch("sm_90a");
  const Tiles tiles = {{forward, parse_tile("wgmma 128x128 w8 s1 b1")},
                       {backward_dq, parse_tile("wgmma 64x128 w4 s1 b1")},
                       {backward_dkv, parse_tile("mma 64x64 w4 s1 b1")}};
  for (Pass pass : kPasses)
    for (const KernelSpec& k : Operation(resolved(AttentionSpec()), arch, tiles).kernels(pass)) {
      EXPECT_EQ(k.pass, pass);
      EXPECT_EQ(k.arch, arch);
      EXPECT_EQ(k.tile, tiles.count(k.kind) ? tiles.at(k.kind) : TileConfig());
    }
}

/// Calls `check` with the kernels of each spec and pass under both masks.
template <typename Check> void compare_masks(Causal first, Causal second, const Check& check) {
  for (AttentionSpec spec : test::all_specs())
    for (Pass pass : kPasses) {
      const auto kernels = [&](Causal causal) {
        spec.causal = causal;
        return Operation(resolved(spec), find_arch("sm_80")).kernels(pass);
      };
      SCOPED_TRACE(to_string(spec));
      check(kernels(first), kernels(second));
    }
}

TEST(Kernels, AreSharedWhereTheDiagonalLiesElsewhere) {
  compare_masks(Causal::top_left, Causal::bottom_right,
                [](const auto& first, const auto& second) { EXPECT_EQ(first, second); });
}

TEST(Kernels, OfQuantisationDoNotDependOnTheMask) {
  compare_masks(Causal::none, Causal::top_left, [](const auto& full, const auto& causal) {
    ASSERT_EQ(kinds_of(full), kinds_of(causal));
    for (size_t i = 0; i < full.size(); ++i)
      EXPECT_EQ(full[i] == causal[i], !definition_of(full[i].kind).tiling)
          << to_string(full[i].kind);
  });
}

TEST(Kernels, DoNotDependOnTheDeterminismFlag) { // but for a fused backward all are deterministic
  for (AttentionSpec spec : test::all_specs())
    for (const char* name : {"sm_80", "sm_90a"})
      for (Pass pass : kPasses) {
        const Arch& arch = find_arch(name);
        const auto deterministic = Operation(resolved(spec), arch).kernels(pass);
        AttentionSpec free = spec;
        free.deterministic = false;
        if (pass == Pass::forward || !Operation(resolved(free), arch).fused())
          EXPECT_EQ(Operation(resolved(free), arch).kernels(pass), deterministic)
              << to_string(spec);
      }
}

TEST(Definitions, AreOneForEachFamilyOfTiles) {
  for (const auto& [kind, name] : Words<KernelKind>::all) {
    std::vector<Family> families;
    if (definition_of(kind).tiling)
      families = {Family::mma, Family::wgmma, Family::ws};
    if (kind == forward || kind == backward_dq || kind == backward_dkv)
      families.push_back(Family::pair);
    if (kind == backward) // with wgmma it is not built
      families = {Family::mma, Family::ws};
    if (!families.empty() && kind != backward) // which very wide heads have not
      families.push_back(Family::team);
    EXPECT_EQ(families_of(kind), families) << name;
    for (Family family : families_of(kind)) {
      const KernelDefinition& own = definition_of(kind, family);
      EXPECT_EQ(own.family, family) << name;
    }
  }
}

TEST(Kernels, ServeAllHeadsThatTheirWidthHas) {
  const auto names = [](int head_dim) {
    AttentionSpec spec;
    spec.head_dim = head_dim;
    std::vector<std::string> names;
    for (const KernelSpec& k : Operation(resolved(spec), find_arch("sm_90a")).distinct_kernels()) {
      names.push_back(kernel_name(k));
      EXPECT_EQ(k.channels, head_dim == width(spec) ? Channels::all : Channels::part);
    }
    return names;
  };
  EXPECT_EQ(names(32), names(56));
  EXPECT_EQ(names(72), names(120));
  EXPECT_EQ(names(136), names(248));
  EXPECT_EQ(names(80)[2], "sagebwd_forward_d128_part_ws_192x128_w12_s4_b1");
  EXPECT_EQ(names(128)[2], "sagebwd_forward_d128_ws_192x128_w12_s4_b1");
}

TEST(Kernels, ServeAllWindows) {
  const auto names = [](Causal causal, int left, int right) {
    AttentionSpec spec;
    spec.causal = causal, spec.window_left = left, spec.window_right = right;
    std::vector<std::string> names;
    for (const KernelSpec& k : Operation(resolved(spec), find_arch("sm_90a")).distinct_kernels())
      names.push_back(kernel_name(k));
    return names;
  };
  EXPECT_EQ(names(Causal::none, 5, 7), names(Causal::bottom_right, 4096, kNoWindow));
  EXPECT_EQ(names(Causal::none, kNoWindow, 7), names(Causal::top_left, kNoWindow, kNoWindow));
  EXPECT_NE(names(Causal::none, 5, 7), names(Causal::top_left, kNoWindow, kNoWindow));
}

TEST(KernelName, TellsWhatTheKernelIs) {
  AttentionSpec s;
  EXPECT_EQ(kernel_name(test::kernel_of(backward_dkv, Pass::backward, s, "sm_80")),
            "sagebwd_backward_dkv_d128_mma_64x64_w4_s1_b2");
  s = {64, DType::fp16, Causal::bottom_right, Granularity::block, Precision::qk16, false};
  EXPECT_EQ(kernel_name(test::kernel_of(forward, Pass::forward, s, "sm_90a")),
            "sagebwd_forward_d64_fp16_causal_top_left_block_qk16_no_smooth_k_wgmma_64x64_w4_s1_b3");
  s = {};
  s.group_kv = 64, s.sink_keys = 0;
  EXPECT_EQ(kernel_name(test::kernel_of(forward, Pass::forward, s, "sm_80")),
            "sagebwd_forward_d128_64x64_sink_keys_0_mma_64x64_w4_s1_b2");
}

TEST(KernelName, IsAnIdentifierAndNamesOneSourceOnAnArchitecture) {
  const std::string start = "sagebwd_", letters = "abcdefghijklmnopqrstuvwxyz0123456789_";
  std::map<std::string, std::string> source_of;
  std::set<std::string> ambiguous;
  test::Distinct distinct;
  for (const char* arch : {"sm_80", "sm_90a"})
    for (const AttentionSpec& spec : test::all_specs())
      for (Pass pass : kPasses)
        for (const KernelSpec& kernel : Operation(resolved(spec), find_arch(arch)).kernels(pass)) {
          if (!distinct.insert(kernel))
            continue;
          const KernelSource source = emit(kernel);
          EXPECT_EQ(source.name, kernel_name(kernel));
          EXPECT_EQ(source.name.rfind(start, 0), 0u) << source.name;
          EXPECT_GT(source.name.size(), start.size());
          EXPECT_EQ(source.name.find_first_not_of(letters), std::string::npos) << source.name;
          // Names tell kernels apart in what a profiler shows: a name, one text.
          const auto at = source_of.emplace(source.name, source.text).first;
          if (at->second != source.text)
            ambiguous.insert(source.name);
        }
  EXPECT_EQ(ambiguous, std::set<std::string>()) << "these names have two sources each";
  EXPECT_GT(source_of.size(), 500u);
}

TEST(KernelName, TellsTilesApart) {
  KernelSpec kernel = test::kernel_of(forward, Pass::forward, {}, "sm_90a");
  std::set<std::string> names;
  for (const char* tile : {"mma 64x64 w4 s1 b1", "wgmma 64x64 w4 s1 b1", "mma 128x64 w8 s1 b1",
                           "mma 64x64 w4 s2 b1", "mma 64x64 w4 s1 b2", "mma 64x128 w4 s1 b1"}) {
    kernel.tile = parse_tile(tile);
    EXPECT_TRUE(names.insert(kernel_name(kernel)).second) << tile;
  }
}

} // namespace
