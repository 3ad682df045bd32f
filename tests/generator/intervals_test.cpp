//===- intervals_test.cpp - Specs whose keys have intervals ----------------===//
#include "generator/emit.h"
#include "generator/operation.h"
#include "tests/generator/specs.h"

#include <gtest/gtest.h>

using namespace sagebwd;

namespace {

AttentionSpec with_intervals(int intervals, Causal causal = Causal::none) {
  AttentionSpec spec;
  spec.intervals = intervals, spec.causal = causal;
  return spec;
}

TEST(Intervals, TheirNumberFitsTheMask) {
  for (int intervals : {2, 4})
    EXPECT_EQ(resolved(with_intervals(intervals))->intervals, intervals);
  for (Causal causal : {Causal::top_left, Causal::bottom_right})
    for (int intervals : {1, 2})
      EXPECT_EQ(resolved(with_intervals(intervals, causal))->intervals, intervals);
  for (int intervals : {-1, 1, 3, 5})
    test::expect_refusal([&] { resolved(with_intervals(intervals)); },
                         {"intervals = ", "without a causal mask: a key has 2 or 4 numbers there"});
  for (int intervals : {3, 4})
    test::expect_refusal([&] { resolved(with_intervals(intervals, Causal::top_left)); },
                         {"with a causal mask: a key has 1 or 2 numbers there"});
}

TEST(Intervals, BlocksHaveASizeAndCanBeGiven) {
  const ResolvedSpec usual = resolved(with_intervals(2));
  EXPECT_EQ(usual->sparse_q, 128);
  EXPECT_EQ(usual->sparse_kv, 128);
  EXPECT_EQ(usual->sink_keys, 0);
  AttentionSpec small = with_intervals(2);
  small.sparse_q = small.sparse_kv = 64;
  EXPECT_EQ(resolved(small)->group_kv, 64);
  EXPECT_EQ(parse_spec(to_string(*usual)), *usual);
}

TEST(Intervals, WhatTheyExcludeSaysSo) {
  const auto refuse = [](auto change, std::initializer_list<const char*> parts) {
    AttentionSpec spec = with_intervals(2);
    change(spec);
    test::expect_refusal([&] { resolved(spec); }, parts);
  };
  refuse([](AttentionSpec& s) { s.window_left = 5; }, {"intervals = 2", "with a window"});
  refuse([](AttentionSpec& s) { s.packed = true; },
         {"intervals = 2", "let intervals say where they end"});
  refuse([](AttentionSpec& s) { s.smooth_q = true; }, {"intervals = 2", "smooth_q"});
  refuse([](AttentionSpec& s) { s.sink_keys = 1; }, {"sink_keys = 1", "with intervals"});
  refuse([](AttentionSpec& s) { s.linear = LinearKeys::all; }, {"intervals = 2", "linear = all"});
  refuse([](AttentionSpec& s) { s.gradient_kernels = Backward::fused; },
         {"with intervals: only the split kernels"});
}

/// The kernel that makes lists is that of intervals, and no kernel of routers or of linear
/// attention is built beside it.
TEST(Intervals, OneKernelBesideThePassesMakesTheirLists) {
  const ResolvedSpec spec = resolved(with_intervals(4));
  int own = 0;
  for (const KernelSpec& kernel : kernels_beside(spec, find_arch("sm_80"))) {
    own += kernel.kind == KernelKind::interval_bits;
    EXPECT_NE(kernel.kind, KernelKind::pack_mask);
    EXPECT_NE(kernel.kind, KernelKind::route_blocks);
    EXPECT_NE(kernel.kind, KernelKind::linear_states);
  }
  EXPECT_EQ(own, 1);
}

/// A bit for each block and one more in a word, and as many words again; the kernels' sources have
/// the file that asks about single scores, and those of lists have not.
TEST(Intervals, ListsAndSources) {
  const ResolvedSpec spec = resolved(with_intervals(4));
  EXPECT_EQ(list_words(*spec, {1, 1, 1, 128, 128 * 31}), 2);
  EXPECT_EQ(list_words(*spec, {1, 1, 1, 128, 128 * 32}), 4);
  AttentionSpec lists = *spec;
  lists.intervals = 0;
  for (const AttentionSpec& each : {*spec, lists})
    for (const KernelSpec& kernel :
         Operation(resolved(each), find_arch("sm_80")).kernels(Pass::forward))
      if (kernel.kind == KernelKind::forward)
        EXPECT_EQ(emit(kernel).text.find("[INTERVALS_A_KEY]") != std::string::npos,
                  has_intervals(each));
}

} // namespace
