//===- very_wide_test.cpp - Heads of more than 256 channels ------------------===//

#include "generator/choice.h"
#include "generator/kernels/attention.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "templates/layouts/forward_pair.cuh"
#include "templates/layouts/halves.cuh"
#include "templates/layouts/team.cuh"
#include "tests/generator/specs.h"

using namespace sagebwd;
using enum KernelKind;

namespace {

AttentionSpec of(int head_dim) {
  AttentionSpec s;
  s.head_dim = head_dim;
  return s;
}
AttentionSpec with(const auto& change) {
  AttentionSpec s = of(512);
  change(s);
  return s;
}

TEST(VeryWide, EveryStepOfChannelsIsBuiltOnEveryArchitecture) {
  for (int head_dim = 264; head_dim <= 512; head_dim += 8)
    for (Precision precision : {Precision::six_of_seven, Precision::gradients16}) {
      AttentionSpec spec = of(head_dim);
      spec.precision = precision;
      const ResolvedSpec s = resolved(spec);
      EXPECT_EQ(s->group_kv, 64);
      EXPECT_EQ(s->sink_keys, 1);
      for (const Arch& arch : all_archs()) {
        const Operation operation(s, arch);
        EXPECT_FALSE(operation.fused());
        for (Pass pass : test::kPasses)
          for (const KernelSpec& k : operation.kernels(pass)) {
            EXPECT_EQ(k.attention.head_dim, 512);
            EXPECT_EQ(k.channels, head_dim == 512 ? Channels::all : Channels::part);
            const bool hopper = arch.name == "sm_90a";
            EXPECT_LE(shared_bytes(k), (hopper ? 227 : 99) * 1024) << kernel_name(k);
            if (definition_of(k).tiling)
              EXPECT_EQ(k.tile.family, hopper ? Family::pair : Family::team) << kernel_name(k);
          }
      }
    }
}

TEST(VeryWide, MasksAndPackedSequencesAreTaken) {
  for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right})
    for (int left : {kNoWindow, 0, 100})
      for (bool packed : {false, true}) {
        AttentionSpec s = of(320);
        s.causal = causal, s.window_left = left, s.packed = packed;
        s.window_right = causal == Causal::none && left != kNoWindow ? 50 : kNoWindow;
        EXPECT_NO_THROW(Operation(resolved(s), find_arch("sm_89")).distinct_kernels(true));
      }
}

/// Whether the error names what was given and how wide the head is, and says what there is.
void expect_named(const AttentionSpec& s, const char* given) {
  test::expect_refusal([&] { resolved(s); },
                       {given, "not supported for head dimension 512", "above 256", "'row'",
                        "'six-of-seven' or 'gradients16'", "take at most 256 channels"});
}

TEST(VeryWide, WhatIsNotBuiltIsRefusedByName) {
  expect_named(with([](auto& s) { s.granularity = Granularity::block; }), "granularity = block");
  expect_named(with([](auto& s) { s.precision = Precision::qk16; }), "precision = qk16");
  expect_named(with([](auto& s) { s.precision = Precision::dv16; }), "precision = dv16");
  expect_named(with([](auto& s) { s.group_kv = 128; }), "group_kv = 128");
  expect_named(with([](auto& s) { s.smooth_q = true; }), "smooth_q");
  expect_named(with([](auto& s) { s.smooth_v = true; }), "smooth_v");
  expect_named(with([](auto& s) { s.max_logits = true; }), "max_logits");
  expect_named(with([](auto& s) { s.dp_sums = DpSums::fp16; }), "dp_sums = fp16");
  expect_named(with([](auto& s) { s.intervals = 2; }), "intervals = 2");
  expect_named(with([](auto& s) { s.mask = "q >= k"; }), "mask = q >= k");
  expect_named(with([](auto& s) { s.score = "2.0 * s"; }), "score = 2.0 * s");
  expect_named(with([](auto& s) { s.sparse_q = s.sparse_kv = 64; }),
               "lists of blocks of 64 queries and 64 keys");
  expect_named(
      with([](auto& s) { s.sparse_q = s.sparse_kv = 128, s.linear = LinearKeys::complement; }),
      "linear = complement");
  test::expect_refusal(
      [] { resolved(with([](auto& s) { s.gradient_kernels = Backward::fused; })); },
      {"gradient_kernels = fused", "head dimension 512", "128 at most"});
}

TEST(VeryWide, FamiliesSayForWhichHeadsTheyAre) {
  for (KernelKind kind : {forward, backward_dq, backward_dkv}) {
    const Arch &arch = find_arch("sm_90a"), &ampere = find_arch("sm_80");
    const ResolvedSpec wide = resolved(of(512)), other = resolved(of(256));
    const TileConfig pair = default_tile(kind, wide, arch), team = default_tile(kind, wide, ampere);
    EXPECT_EQ(objection(kind, wide, pair, arch), "");
    EXPECT_EQ(objection(kind, wide, team, arch), "");
    EXPECT_EQ(tiles_worth_trying(kind, wide, arch), std::vector{pair}); // bits must not change
    EXPECT_EQ(tiles_worth_trying(kind, wide, ampere), std::vector{team});
    EXPECT_EQ(builds(kind, other, Family::pair), kind != forward);
    EXPECT_FALSE(builds(kind, other, Family::team));
    for (Family family : {Family::mma, Family::wgmma, Family::ws})
      EXPECT_FALSE(builds(kind, wide, family)) << value_text(family);
    const TileConfig mma = tile_with(kind, wide, Family::mma, 4, 1, 1);
    EXPECT_NE(objection(kind, wide, mma, arch).find("for the family 'team'"), std::string::npos);
  }
}

/// No part begins before the one before it ends, and swizzled ones at multiples of 1024 bytes.
void expect_in_order(std::initializer_list<std::pair<int, int>> parts, int total) {
  int end = 0;
  for (const auto& [offset, bytes] : parts) {
    EXPECT_EQ(offset, end);
    end = offset + bytes;
  }
  EXPECT_EQ(total, end);
}

TEST(VeryWide, PartsOfSharedMemoryLieOneBehindTheOther) {
  for (bool in_16_bits : {false, true}) {
    AttentionSpec spec = of(512);
    spec.precision = in_16_bits ? Precision::gradients16 : Precision::six_of_seven;
    const ResolvedSpec s = resolved(spec);
    const auto shape = [&](KernelKind kind, const char* arch = "sm_80") {
      return attention::shape_of(s, default_tile(kind, s, find_arch(arch)));
    };
    const int ring = 4 * 8192, operand = 32 * 64 * (in_16_bits ? 2 : 1);
    const TeamForwardLayout f(shape(forward));
    expect_in_order({{f.queries, 64 * 512},
                     {f.ring, ring},
                     {f.p, 64 * 64},
                     {f.maxima, 2 * 64 * 4},
                     {f.factors, 2 * 64 * 4}},
                    f.total);
    const TeamDqLayout q(shape(backward_dq));
    expect_in_order({{q.queries, 32 * 512},
                     {q.dout, 32 * 1024},
                     {q.ring, ring},
                     {q.ds, operand},
                     {q.maxima, 4 * 32 * 4}},
                    q.total);
    const TeamDkvLayout k(shape(backward_dkv));
    expect_in_order({{k.keys, 32 * 512},
                     {k.values, 32 * 1024},
                     {k.ring, ring},
                     {k.p, operand},
                     {k.ds, operand},
                     {k.maxima, 2 * 4 * 32 * 4},
                     {k.rows, 2 * 4 * 64 * 4}},
                    k.total);
    for (int at : {f.queries, f.ring, q.dout, q.ring, k.values, k.ring})
      EXPECT_EQ(at % 1024, 0);
    // On sm_90a; barriers of three or fewer stages, each of two.
    const ForwardPairLayout p(shape(forward, "sm_90a"));
    expect_in_order({{p.queries, 64 * 512},
                     {p.keys, 2 * 64 * 512},
                     {p.values, 3 * 64 * 512},
                     {p.p, 2 * 64 * 64},
                     {p.maxima, 2 * 64 * 4},
                     {p.key_barriers, 2 * 16},
                     {p.value_barriers, 3 * 16},
                     {p.queries_came, 8}},
                    p.total);
    const HalvesLayout h(shape(backward_dq, "sm_90a"));
    const int handed = 2 * 64 * 64 * (in_16_bits ? 2 : 1);
    const int units = in_16_bits ? 1 : 2, scales = in_16_bits ? 0 : 2 * 128 * 8;
    expect_in_order({{h.own_scores, 64 * 512},
                     {h.own_values, 64 * 1024},
                     {h.panels, 2 * 3 * 8192},
                     {h.units, 64 * 1024},
                     {h.handed, handed},
                     {h.scales, scales},
                     {h.rows, 2 * 4 * 64 * 4},
                     {h.panel_barriers, 2 * 3 * 16},
                     {h.unit_barriers, units * 16},
                     {h.own_came, 8}},
                    h.total);
    EXPECT_EQ(HalvesLayout(shape(backward_dkv, "sm_90a")).total, h.total);
    for (int at : {p.keys, p.values, p.p, h.own_values, h.panels, h.units})
      EXPECT_EQ(at % 1024, 0);
  }
}

} // namespace
