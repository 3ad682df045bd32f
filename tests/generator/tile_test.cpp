//===- tile_test.cpp - Tiles and the shared memory they take ---------------===//

#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/space.h"
#include "tests/generator/specs.h"

using namespace sagebwd;
using test::expect_refusal;

namespace {

const std::vector<KernelKind>& kAttention = tiled_kernels();

/// Checks a tile of a kernel of the default spec of 128 channels, written as text.
std::function<void()> checking(KernelKind kind, const char* tile, const char* arch = "sm_80",
                               Granularity granularity = Granularity::row) {
  AttentionSpec s;
  s.granularity = granularity;
  return [=] { check_tile(tiled_kernel(kind, resolved(s), find_arch(arch), parse_tile(tile))); };
}

TEST(Tile, IsReadBack) {
  for (const char* text : {"mma 128x64 w8 s2 b1", "wgmma 64x128 w4 s1 b3"})
    EXPECT_EQ(to_string(parse_tile(text)), text);
  const TileConfig tile = parse_tile("wgmma 64x128 w4 s1 b3");
  EXPECT_EQ(tile, (TileConfig{Family::wgmma, 64, 128, 4, 1, 3}));
}

TEST(Tile, ItsFamilySaysHowItMultipliesAndWhoCopies) {
  const auto expect = [](const char* family, Instruction instruction, Roles roles) {
    const TileConfig tile = parse_tile(std::string(family) + " 128x128 w8 s2 b1");
    EXPECT_EQ(tile.family.instruction(), instruction) << family;
    EXPECT_EQ(tile.family.roles(), roles) << family;
  };
  expect("mma", Instruction::mma, Roles::alike);
  expect("wgmma", Instruction::wgmma, Roles::alike);
  expect("ws", Instruction::wgmma, Roles::copier);
  expect("pair", Instruction::wgmma, Roles::pairs);
  expect("team", Instruction::mma, Roles::team);
}

TEST(Tile, OtherTextIsRefusedWithAnExample) {
  for (const char* text : {"", "mma", "128x64 w8 s2 b1", "mma 128x64 w8 s2", "mma 128x64 w8 s2 b",
                           "mma 128x64 w8 s2 b1 ", "mma 128x64 w8 s2 b1x", "mma128x64 w8 s2 b1",
                           "hmma 128x64 w8 s2 b1", "wgmmaa 128x64 w8 s2 b1", "mma 128,64 w8 s2 b1"})
    expect_refusal([&] { parse_tile(text); }, {("'" + std::string(text) + "'").c_str(),
                                               "mma or wgmma", "as in 'mma 64x128 w4 s1 b2'"});
}

TEST(Tile, TheUsualOnesSuit) {
  EXPECT_NO_THROW(checking(KernelKind::forward, "mma 128x128 w8 s2 b1")());
  EXPECT_NO_THROW(checking(KernelKind::backward_dq, "mma 64x128 w4 s1 b2")());
  EXPECT_NO_THROW(checking(KernelKind::backward_dkv, "mma 64x128 w8 s1 b1")());
  EXPECT_NO_THROW(checking(KernelKind::backward_dkv, "wgmma 64x64 w4 s1 b2", "sm_90a")());
}

TEST(Tile, WhatCannotBeBuiltIsRefusedAndSaysWhy) {
  using enum KernelKind;
  const char* who = "does not suit forward of d128 bf16 causal=none row 64x128";
  expect_refusal(
      checking(forward, "mma 96x128 w6 s1 b1"),
      {"'mma 96x128 w6 s1 b1'", who, "on sm_80", "64 queries with 4 warps or 128 with 8"});
  expect_refusal(checking(forward, "pair 64x128 w8 s1 b1", "sm_90a"),
                 {"one warpgroup holds O of at most 256 channels"});
  expect_refusal(checking(forward, "mma 128x128 w4 s1 b1"), {"64 queries with 4 warps"});
  expect_refusal(checking(backward_dkv, "mma 64x128 w4 s1 b1"), {"64 keys with 4 warps"});
  expect_refusal(checking(forward, "mma 64x64 w4 s1 b1"), {"walks over 128 keys"});
  expect_refusal(checking(backward_dkv, "mma 128x64 w4 s1 b1"), {"walks over 64 queries"});
  expect_refusal(checking(forward, "mma 64x128 w4 s0 b1"), {"1 or 2 stages"});
  expect_refusal(checking(forward, "mma 64x128 w4 s3 b1"), {"1 or 2 stages"});
  expect_refusal(checking(forward, "mma 64x128 w4 s1 b0"), {"1 to 8 blocks"});
  expect_refusal(checking(forward, "mma 64x128 w4 s1 b9"), {"1 to 8 blocks"});
  expect_refusal(checking(backward_dq, "mma 64x64 w4 s1 b1", "sm_80", Granularity::block),
                 {"'block'", "group of 128 queries"});
  for (const Arch& arch : all_archs())
    if (arch.name != "sm_90a")
      expect_refusal(checking(forward, "wgmma 64x128 w4 s1 b1", arch.name.data()),
                     {"wgmma exists on sm_90a alone", "the family is mma"});
  const char* ws = "ws 192x128 w12 s4 b1";
  EXPECT_NO_THROW(checking(forward, ws, "sm_90a")());
  expect_refusal(checking(forward, ws), {"wgmma exists on sm_90a alone"});
  expect_refusal(checking(forward, "ws 64x128 w4 s4 b1", "sm_90a"),
                 {"128 queries with 8 warps or 192 with 12"});
  expect_refusal(checking(forward, "ws 192x128 w12 s3 b1", "sm_90a"), {"2 or 4 stages"});
  expect_refusal(checking(forward, "ws 192x128 w12 s4 b2", "sm_90a"), {"all registers of an SM"});
  expect_refusal(checking(backward_dkv, "ws 64x192 w12 s2 b1", "sm_90a"),
                 {"registers do not suffice", "128 channels"});
}

TEST(Tile, WhatDoesNotFitIsRefusedWithBothSizes) {
  const char* tile = "mma 128x128 w8 s2 b1";
  EXPECT_NO_THROW(checking(KernelKind::backward_dq, tile, "sm_80")());
  // Q and dO: 128 * (128 + 256); stages of K and V: 64 * (128 + 256), and scales: 16 * 4;
  // transposed K: 128 * 128
  expect_refusal(checking(KernelKind::backward_dq, tile, "sm_89"),
                 {"needs 114816 bytes", "sm_89 has 101376"});
}

TEST(Tile, QuantisationPassesHaveNone) {
  for (const auto& [quantisation, name] : Words<KernelKind>::all) {
    if (definition_of(quantisation).tiling)
      continue;
    EXPECT_EQ(default_tile(quantisation, resolved(AttentionSpec()), find_arch("sm_80")),
              TileConfig{});
    if (!name.starts_with("linear_") && !name.starts_with("estimated_") && name != "route_blocks")
      EXPECT_EQ(shared_bytes(kernel_of(quantisation, Pass::forward, resolved(AttentionSpec()),
                                       find_arch("sm_80"), {})),
                0);
  }
}

TEST(Tile, DefaultsSuitEverySpecOnEveryArchitecture) {
  for (const AttentionSpec& spec : test::all_specs())
    for (const Arch& arch : all_archs()) {
      const ResolvedSpec s = resolved(spec);
      SCOPED_TRACE(to_string(*s) + " on " + std::string(arch.name));
      for (KernelKind kind : kAttention) {
        if (!test::fits(kind, spec, arch))
          continue;
        const TileConfig tile = default_tile(kind, s, arch);
        EXPECT_NO_THROW(check_tile(tiled_kernel(kind, s, arch, tile)));
        if (s->head_dim > 256)
          EXPECT_EQ(tile.family, arch.name == "sm_90a" ? Family::pair : Family::team);
        else
          EXPECT_EQ(tile.family == Family::mma, arch.name != "sm_90a");
        const int bytes = shared_bytes(kind, s, tile);
        const bool consumer = arch.name == "sm_86" || arch.name == "sm_89" || arch.major == 12;
        EXPECT_LE(bytes, consumer ? 99 * 1024 : arch.max_shared_bytes);
        // Every SM has 1 KB more than a block may take, and keeps 1 KB of each block's for itself.
        // Asking for a residency that cannot be had is vain, but may not cost registers: 256
        // threads have all 255.
        if (tile.blocks_per_sm * tile.warps * 32 > 256)
          EXPECT_LE(tile.blocks_per_sm * (bytes + 1024), arch.max_shared_bytes + 1024)
              << to_string(kind) << " " << to_string(tile);
        EXPECT_LE(tile.blocks_per_sm * tile.warps * 32, arch.major == 8 ? 1536 : 2048);
      }
    }
}

} // namespace
