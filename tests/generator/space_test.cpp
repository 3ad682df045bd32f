//===- space_test.cpp - The tiles worth trying -----------------------------===//

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "tests/generator/specs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

using namespace sagebwd;

namespace {

const std::vector<KernelKind>& kKinds = tiled_kernels();

using Visit = std::function<void(KernelKind, const AttentionSpec&, const Arch&,
                                 const std::vector<TileConfig>&)>;

/// Every architecture, kernel and option that shapes a tile, where there is one.
void for_each_space(const Visit& visit) {
  for (const Arch& arch : all_archs())
    for (int head_dim : kWidths)
      for (Granularity granularity : {Granularity::row, Granularity::block})
        for (const auto& [precision, word] : Words<Precision>::all)
          for (KernelKind kind : kKinds)
            for (bool deterministic : {true, false}) {
              AttentionSpec spec;
              spec.deterministic = deterministic;
              spec.head_dim = head_dim;
              spec.granularity = granularity;
              spec.precision = precision;
              if (!test::fits(kind, spec, arch))
                continue;
              const ResolvedSpec full = resolved(spec);
              SCOPED_TRACE(to_string(spec) + " " + std::string(to_string(kind)) + " " +
                           std::string(arch.name));
              visit(kind, full, arch, tiles_worth_trying(kind, full, arch));
            }
}

TEST(Space, TheDefaultComesFirstAndEveryTileCanBeBuilt) {
  for_each_space([](KernelKind kind, const AttentionSpec& spec, const Arch& arch,
                    const std::vector<TileConfig>& tiles) {
    ASSERT_FALSE(tiles.empty());
    EXPECT_EQ(tiles.front(), default_tile(kind, spec, arch));
    for (const TileConfig& tile : tiles) {
      EXPECT_EQ(objection(kind, spec, tile, arch), "") << to_string(tile);
      EXPECT_EQ(std::count(tiles.begin(), tiles.end(), tile), 1) << to_string(tile);
    }
  });
}

TEST(Space, OnlyWideHeadsOfMmaHaveTilesWithoutStages) {
  int without = 0;
  for_each_space([&](KernelKind kind, const AttentionSpec& spec, const Arch&,
                     const std::vector<TileConfig>& tiles) {
    for (const TileConfig& tile : tiles)
      if (tile.stages == 0) {
        ++without;
        EXPECT_EQ(tile.family, Family::mma) << to_string(tile);
        EXPECT_TRUE(kind == KernelKind::backward_dq || kind == KernelKind::backward_dkv);
        EXPECT_GT(spec.head_dim, 128);
        EXPECT_EQ(spec.granularity, Granularity::row);
      }
  });
  EXPECT_GT(without, 0);
}

TEST(Space, TheBlocksOfAnSmFitItsMemory) {
  // The CUDA C++ Programming Guide's table of technical specifications, KB of shared memory per SM.
  const auto capacity = [](const Arch& arch) {
    const int version = 10 * arch.major + arch.minor;
    return 1024 * (version == 80 || version == 87                     ? 164
                   : version == 86 || version == 89 || version >= 120 ? 100
                                                                      : 228);
  };
  for_each_space([&](KernelKind kind, const AttentionSpec& spec, const Arch& arch,
                     const std::vector<TileConfig>& tiles) {
    for (size_t i = 1; i < tiles.size(); ++i) {
      const TileConfig& t = tiles[i];
      EXPECT_LE(t.blocks_per_sm * (shared_bytes(kind, spec, t) + 1024), capacity(arch))
          << to_string(t);
      // Accumulators of the output alone: less than a thread's share of the registers.
      // A warp of a team has 64 channels of all rows of its block.
      const int rows = kind == KernelKind::backward_dkv ? t.block_kv : t.block_q;
      const int sums = t.family == Family::team ? rows * 64 / 32 : sum_channels(kind, spec) / 2;
      const int outputs = (kind == KernelKind::backward_dkv ? 2 : 1) * sums;
      EXPECT_LT(outputs * 32 * t.warps * t.blocks_per_sm, 65536) << to_string(t);
    }
  });
}

/// With fewer, one kernel in three spilled more than the build accepts
/// (templates/kernels/LISTS.md).
TEST(Space, TilesOfListsLeaveRegistersForTheWalk) {
  int tiles = 0;
  for_each_space([&](KernelKind kind, const AttentionSpec& plain, const Arch& arch,
                     const std::vector<TileConfig>&) {
    if (plain.head_dim > 256) // none has lists
      return;
    for (int queries : {64, 128})
      for (int keys : {64, 128})
        for (Causal causal : {Causal::none, Causal::top_left}) {
          AttentionSpec spec = plain;
          spec.sparse_q = queries, spec.sparse_kv = keys, spec.causal = causal;
          spec.group_kv = 0, spec.sink_keys = -1;
          if (queries % spec.group_q != 0 && spec.granularity == Granularity::block)
            continue;
          const std::vector<TileConfig> offered = tiles_worth_trying(kind, resolved(spec), arch);
          for (size_t i = 1; i < offered.size(); ++i) { // behind the default
            const TileConfig& t = offered[i];
            const int registers = 65536 / (32 * t.warps * t.blocks_per_sm);
            const int sums = tiling_of(kind, t.family).accumulators(resolved(spec), t.family);
            EXPECT_GE(registers, std::min(256, sums + 48))
                << to_string(kind) << " " << to_string(t) << " of " << to_string(resolved(spec));
            ++tiles;
          }
        }
  });
  EXPECT_GT(tiles, 1000);
}

TEST(Space, NoTwoTilesGiveTheSameCode) {
  for_each_space(
      [](KernelKind, const AttentionSpec&, const Arch&, const std::vector<TileConfig>& tiles) {
        std::set<std::string> seen;
        for (TileConfig t : tiles) {
          const int registers = std::min(255, 65536 / (32 * t.warps * t.blocks_per_sm) / 8 * 8);
          t.blocks_per_sm = 0;
          EXPECT_TRUE(seen.insert(to_string(t) + std::to_string(registers)).second) << to_string(t);
        }
      });
}

TEST(Space, HopperChoosesBetweenFamiliesWhereTheyGiveTheSameBits) {
  for_each_space([](KernelKind kind, const AttentionSpec& spec, const Arch& arch,
                    const std::vector<TileConfig>& tiles) {
    std::set<Family> families, built;
    for (const TileConfig& tile : tiles)
      families.insert(tile.family);
    for (Family family : families_of(kind)) // some are not built for every spec
      if (family == Family::mma ? spec.head_dim <= 256 && test::fits(kind, spec, find_arch("sm_80"))
                                : builds(kind, spec, family))
        built.insert(family);
    // All products of the forward are of integers where S is; dP never is. mma.sync's start from a
    // number that rounds their sums at other places.
    const bool exact = kind == KernelKind::forward && which_int8(spec.precision).s;
    const bool choice = arch.name == "sm_90a" && (exact || !spec.deterministic);
    if (spec.deterministic && default_tile(kind, spec, arch).family != Family::mma)
      built.erase(Family::mma), built.erase(Family::team);
    EXPECT_EQ(families.size(), choice ? built.size() : 1u);
  });
}

TEST(Space, AnotherFamilyIsRefusedWhereBitsWouldChange) {
  const Arch& arch = find_arch("sm_90a");
  AttentionSpec spec = *resolved(AttentionSpec());
  const TileConfig mma = parse_tile("mma 64x128 w4 s1 b2");
  EXPECT_EQ(objection(KernelKind::backward_dq, spec, mma, arch), "");
  EXPECT_NE(objection_to_trying(KernelKind::backward_dq, spec, mma, arch).find("deterministic"),
            std::string::npos);
  EXPECT_NE(objection_to_trying(KernelKind::forward, spec, mma, arch).find("deterministic"),
            std::string::npos);
  EXPECT_EQ(
      objection_to_trying(KernelKind::forward, spec, parse_tile("wgmma 64x128 w4 s2 b3"), arch),
      "");
  spec.deterministic = false;
  for (KernelKind kind : {KernelKind::forward, KernelKind::backward_dq})
    EXPECT_EQ(objection_to_trying(kind, spec, mma, arch), "");
}

/// The beginning and the end of a walk decide which units its sums pass through, and in which order
/// masked groups come (tests/gpu/tiles_test.cpp compares the bits).
TEST(Space, UnderAMaskTilesOfOtherStepsAreRefusedWhereBitsWouldChange) {
  struct {
    KernelKind kind;
    const char* tile;
    bool dense, top_left, bottom_right, window; // whether it may be tried
  } const rows[] = {
      {KernelKind::backward_dkv, "ws 64x128 w8 s4 b1", true, false, false, false}, // beside 192
      {KernelKind::forward, "wgmma 128x128 w8 s1 b1", true, true, false, false},   // beside 64
      {KernelKind::forward, "ws 192x128 w12 s2 b1", true, true, true, true}, // each 64 by itself
      {KernelKind::backward_dq, "ws 128x128 w8 s2 b1", true, true, true, true},
  };
  const Arch& arch = find_arch("sm_90a");
  for (const auto& row : rows) {
    const auto may = [&](Causal causal, int left) {
      AttentionSpec spec;
      spec.head_dim = 64, spec.causal = causal, spec.window_left = left;
      const TileConfig tile = parse_tile(row.tile);
      EXPECT_EQ(objection(row.kind, resolved(spec), tile, arch), "") << row.tile;
      const bool with_order = objection_to_trying(row.kind, resolved(spec), tile, arch).empty();
      spec.deterministic = false;
      EXPECT_EQ(objection_to_trying(row.kind, resolved(spec), tile, arch), "") << row.tile;
      return with_order;
    };
    EXPECT_EQ(may(Causal::none, kNoWindow), row.dense) << row.tile;
    EXPECT_EQ(may(Causal::top_left, kNoWindow), row.top_left) << row.tile;
    EXPECT_EQ(may(Causal::bottom_right, kNoWindow), row.bottom_right) << row.tile;
    EXPECT_EQ(may(Causal::top_left, 100), row.window) << row.tile;
  }
}

TEST(Space, OffersAChoiceWhereThereIsRoom) {
  const Arch& hopper = find_arch("sm_90a");
  for (int head_dim : {64, 128})
    for (KernelKind kind : kKinds)
      for (bool deterministic : {true, false}) {
        AttentionSpec spec;
        spec.head_dim = head_dim;
        spec.deterministic = deterministic;
        // A deterministic backward keeps to its family, which at 128 channels fits one tile.
        const bool one_family = deterministic && kind != KernelKind::forward;
        EXPECT_GE(tiles_worth_trying(kind, resolved(spec), hopper).size(), one_family ? 1u : 4u);
      }
}

TEST(Space, GradientsOfWideHeadsTakeTurnsWhereSharedMemoryIsScarce) {
  AttentionSpec spec;
  spec.head_dim = 256;
  for (const Arch& arch : all_archs()) {
    EXPECT_NO_THROW(Operation(resolved(spec), arch).kernels(Pass::forward)) << arch.name;
    EXPECT_NO_THROW(Operation(resolved(spec), arch).kernels(Pass::backward)) << arch.name;
    for (KernelKind kind : {KernelKind::backward_dq, KernelKind::backward_dkv})
      EXPECT_EQ(default_tile(kind, resolved(spec), arch).stages == 0, test::is_small(arch))
          << arch.name;
    if (!test::is_small(arch))
      continue;
    AttentionSpec in_blocks = spec;
    in_blocks.granularity = Granularity::block;
    test::expect_refusal(
        [&] { Operation(resolved(in_blocks), arch).kernels(Pass::backward); },
        {"no tile of backward_dq fits d256", "take granularity 'row'", "a GPU with more of it"});
  }
  const Arch& hopper = find_arch("sm_90a");
  spec.deterministic = false; // what is fused sums all channels
  EXPECT_FALSE(default_fused_tile(resolved(spec), hopper));
  for (const char* tile : {"ws 128x128 w8 s2 b1", "wgmma 64x128 w4 s1 b2"}) {
    const std::string why =
        objection(KernelKind::backward_dq, resolved(spec), parse_tile(tile), hopper);
    EXPECT_EQ(why.find("sum gradients of all channels, 128 at most") != why.npos,
              std::string_view(tile).starts_with("ws"))
        << why;
  }
}

TEST(Space, WideHeadsOf16BitScoresUnderBlockNeedWgmmasRegisters) {
  AttentionSpec spec;
  spec.head_dim = 136, spec.precision = Precision::qk16, spec.granularity = Granularity::block;
  for (const Arch& arch : all_archs()) {
    SCOPED_TRACE(arch.name);
    if (arch.name == "sm_90a")
      EXPECT_EQ(default_tile(KernelKind::backward_dq, resolved(spec), arch).family, Family::wgmma);
    else if (arch.max_shared_bytes > 128 * 1024)
      test::expect_refusal([&] { default_tile(KernelKind::backward_dq, resolved(spec), arch); },
                           {"needs more registers than mma.sync leaves", "use granularity row"});
  }
}

TEST(Space, IsTheSameEveryTime) {
  const Arch& arch = find_arch("sm_89");
  const ResolvedSpec spec = resolved(AttentionSpec());
  EXPECT_EQ(tiles_worth_trying(KernelKind::forward, spec, arch),
            tiles_worth_trying(KernelKind::forward, spec, arch));
}

TEST(Space, KernelsWithoutATileHaveNone) {
  const Arch& arch = find_arch("sm_80");
  for (KernelKind kind : {KernelKind::key_mean, KernelKind::quantize})
    EXPECT_TRUE(tiles_worth_trying(kind, resolved(AttentionSpec()), arch).empty());
}

} // namespace
