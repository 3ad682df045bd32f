//===- kernels_test.cpp - Which kernels an operation needs -----------------===//

#include "generator/definition.h"
#include "generator/space.h"
#include "tests/generator/specs.h"

#include <algorithm>
#include <map>
#include <regex>
#include <set>

using namespace sagebwd;
using test::kinds_of;
using enum KernelKind;
using Kinds = std::vector<KernelKind>;

namespace {

constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

Kinds kinds_for(Pass pass, Precision precision, bool smooth_k) {
  AttentionSpec s;
  s.precision = precision, s.smooth_k = smooth_k;
  return kinds_of(kernels_of(pass, resolved(s), find_arch("sm_80")));
}

TEST(Kernels, OfAForwardPass) {
  EXPECT_EQ(kinds_for(Pass::forward, Precision::six_of_seven, true),
            (Kinds{key_mean, quantize, forward}));
  EXPECT_EQ(kinds_for(Pass::forward, Precision::six_of_seven, false), (Kinds{quantize, forward}));
  for (bool smooth_k : {false, true}) // S reads Q and K themselves
    EXPECT_EQ(kinds_for(Pass::forward, Precision::qk16, smooth_k), (Kinds{quantize, forward}));
}

TEST(Kernels, OfABackwardPass) {
  const Kinds rest = {quantize, backward_dq, backward_dkv};
  Kinds smooth = {key_mean};
  smooth.insert(smooth.end(), rest.begin(), rest.end());
  for (const auto& [precision, name] : Words<Precision>::all) {
    EXPECT_EQ(kinds_for(Pass::backward, precision, true), smooth);
    EXPECT_EQ(kinds_for(Pass::backward, precision, false), rest);
  }
}

TEST(Kernels, OfAFusedBackwardPass) {
  AttentionSpec s;
  s.precision = Precision::gradients16, s.deterministic = false;
  const Arch& arch = find_arch("sm_80");
  EXPECT_EQ(kinds_of(kernels_of(Pass::backward, resolved(s), arch)),
            (Kinds{key_mean, quantize, backward_dq, backward_dkv}));
  const Tiles tiles = default_tiles(resolved(s), arch, Family::mma);
  EXPECT_EQ(kinds_of(kernels_of(Pass::backward, resolved(s), arch, tiles)),
            (Kinds{key_mean, quantize, backward, round_dq}));
  EXPECT_EQ(kinds_of(kernels_of(Pass::forward, resolved(s), arch, tiles)),
            (Kinds{key_mean, quantize, forward}));
}

TEST(Kernels, AreFusedByDefaultTilesOfMmaWhereTheyFit) {
  for (const auto& [precision, word] : Words<Precision>::all)
    for (const char* name : {"sm_80", "sm_89", "sm_90a"})
      for (bool deterministic : {true, false}) {
        AttentionSpec s;
        s.precision = precision, s.deterministic = deterministic;
        const Arch& arch = find_arch(name);
        // At 128 channels 128 keys do not fit in 99 KB, nor dv16 in the registers.
        const bool fits = arch.max_shared_bytes > 99 * 1024 && precision != Precision::dv16;
        const bool fused = !deterministic && fits;
        EXPECT_EQ(default_tiles(resolved(s), arch, Family::mma).count(backward), fused) << word;
        EXPECT_EQ(default_tiles(resolved(s), find_arch("sm_90a"), Family::wgmma).count(backward),
                  0);
      }
}

TEST(Kernels, AreFusedOnlyWhereTheOrderOfSumsIsFree) {
  const auto expect_refused = [](const AttentionSpec& s, const char* words) {
    const Tiles tiles = {{backward, parse_tile("mma 64x128 w8 s1 b1")}};
    for (const KernelSpec& k : kernels_of(Pass::backward, resolved(s), find_arch("sm_80"), tiles))
      if (k.kind == backward)
        test::expect_refusal([&] { emit(k); }, {words});
  };
  AttentionSpec s;
  expect_refused(s, "no 'deterministic'");
  s.deterministic = false, s.group_kv = 64;
  expect_refused(s, "a block takes the 64 keys of one");
  s.granularity = Granularity::block;
  expect_refused(s, "under 'block' precision 'gradients16'");
}

TEST(Kernels, CarryPassArchitectureAndTheirTile) {
  const Arch& arch = find_arch("sm_90a");
  const Tiles tiles = {{forward, parse_tile("wgmma 128x128 w8 s1 b1")},
                       {backward_dq, parse_tile("wgmma 64x128 w4 s1 b1")},
                       {backward_dkv, parse_tile("mma 64x64 w4 s1 b1")}};
  for (Pass pass : kPasses)
    for (const KernelSpec& k : kernels_of(pass, resolved(AttentionSpec()), arch, tiles)) {
      EXPECT_EQ(k.pass, pass);
      EXPECT_EQ(k.arch, arch);
      EXPECT_EQ(k.tile, tiles.count(k.kind) ? tiles.at(k.kind) : TileConfig());
    }
}

TEST(Kernels, AreSharedWhereTheDiagonalLiesElsewhere) {
  for (AttentionSpec spec : test::all_specs())
    for (Pass pass : kPasses) {
      const Arch& arch = find_arch("sm_80");
      spec.causal = Causal::top_left;
      const auto top_left = kernels_of(pass, resolved(spec), arch);
      spec.causal = Causal::bottom_right;
      EXPECT_EQ(kernels_of(pass, resolved(spec), arch), top_left) << to_string(spec);
    }
}

TEST(Kernels, OfQuantisationDoNotDependOnTheMask) {
  for (AttentionSpec spec : test::all_specs())
    for (Pass pass : kPasses) {
      const Arch& arch = find_arch("sm_80");
      spec.causal = Causal::none;
      const auto full = kernels_of(pass, resolved(spec), arch);
      spec.causal = Causal::top_left;
      const auto causal = kernels_of(pass, resolved(spec), arch);
      ASSERT_EQ(kinds_of(full), kinds_of(causal));
      for (size_t i = 0; i < full.size(); ++i)
        EXPECT_EQ(full[i] == causal[i], !definition_of(full[i].kind).tiling)
            << to_string(full[i].kind);
    }
}

TEST(Kernels, DoNotDependOnTheDeterminismFlag) { // every kernel is deterministic
  for (Pass pass : kPasses) {
    AttentionSpec spec;
    spec.deterministic = false;
    EXPECT_EQ(kernels_of(pass, resolved(spec), find_arch("sm_80")),
              kernels_of(pass, resolved(AttentionSpec()), find_arch("sm_80")));
  }
}

TEST(Definitions, AreOneForEachFamilyOfTiles) {
  for (const auto& [kind, name] : Words<KernelKind>::all) {
    std::vector<Family> families;
    if (definition_of(kind).tiling)
      families = {Family::mma, Family::wgmma};
    if (kind == backward) // with wgmma it is not built
      families = {Family::mma};
    EXPECT_EQ(families_of(kind), families) << name;
    for (Family family : families_of(kind)) {
      const KernelDefinition& own = definition_of(kind, family);
      EXPECT_EQ(own.family, family) << name;
    }
  }
}

TEST(Kernels, OfSpecsThatAreNotBuiltAreRefused) {
  AttentionSpec spec;
  spec.head_dim = 96;
  test::expect_refusal([&] { kernels_of(Pass::forward, resolved(spec), find_arch("sm_80")); },
                       {"head dimension 96"});
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
  const std::regex identifier("sagebwd_[a-z0-9_]+");
  std::map<std::string, std::string> source_of;
  std::set<std::string> ambiguous;
  for (const char* arch : {"sm_80", "sm_90a"})
    for (const AttentionSpec& spec : test::all_specs())
      for (Pass pass : kPasses)
        for (const KernelSpec& kernel : kernels_of(pass, resolved(spec), find_arch(arch))) {
          const KernelSource source = emit(kernel);
          EXPECT_EQ(source.name, kernel_name(kernel));
          EXPECT_TRUE(std::regex_match(source.name, identifier)) << source.name;
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
  std::vector<std::string> names;
  for (const char* tile : {"mma 64x64 w4 s1 b1", "wgmma 64x64 w4 s1 b1", "mma 128x64 w8 s1 b1",
                           "mma 64x64 w4 s2 b1", "mma 64x64 w4 s1 b2", "mma 64x128 w4 s1 b1"}) {
    kernel.tile = parse_tile(tile);
    names.push_back(kernel_name(kernel));
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
}

} // namespace
