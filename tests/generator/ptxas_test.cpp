//===- ptxas_test.cpp - What ptxas is told ----------------------------------===//

#include "generator/choice.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/ptxas.h"

#include <gtest/gtest.h>

#include <set>

using namespace sagebwd;

namespace {

/// Calls a function with every kernel of some thousand operations on every architecture.
template <typename Visit> void for_kernels(const Visit& visit) {
  AttentionSpec spec;
  for (const Arch& arch : all_archs())
    for (int head_dim : {40, 64, 96, 128, 136, 256, 320, 512})
      for (const auto& [precision, name] : Words<Precision>::all)
        for (const auto& [granularity, word] : Words<Granularity>::all)
          for (int options = 0; options < 128; ++options) {
            spec.head_dim = head_dim, spec.precision = precision, spec.granularity = granularity;
            spec.causal = options & 1 ? Causal::top_left : Causal::none;
            spec.window_left = options & 2 ? 100 : kNoWindow;
            spec.packed = options & 4;
            spec.deterministic = !(options & 16);
            spec.dp_sums = options & 32 ? DpSums::fp16 : DpSums::fp32;
            spec.sparse_q = spec.sparse_kv = options & 64 ? 128 : 0;
            spec.smooth_q = !is_sparse(spec) && options & 8; // not together
            spec.intervals = is_sparse(spec) && options & 8 ? 2 : 0;
            spec.max_logits = options & 16;
            for (Pass pass : {Pass::forward, Pass::backward})
              try {
                for (const KernelSpec& k : Operation(resolved(spec), arch).kernels(pass))
                  visit(k);
              } catch (const SpecError&) { // not every combination is built
              }
          }
}

TEST(PtxasRows, EachFitsAKernelThatNoEarlierRowFits) {
  std::set<std::string_view> unused;
  for (const PtxasRow& row : ptxas_rows())
    EXPECT_TRUE(unused.insert(row.name).second) << row.name;
  for_kernels([&](const KernelSpec& k) {
    if (const PtxasRow* row = ptxas_row(k))
      unused.erase(row->name);
  });
  // No default tile is large.
  const KernelSpec large = tiled_kernel(KernelKind::forward, resolved({}), find_arch("sm_80"),
                                        parse_tile("mma 128x128 w8 s1 b1"));
  ASSERT_NE(ptxas_row(large), nullptr);
  unused.erase(ptxas_row(large)->name);
  EXPECT_TRUE(unused.empty()) << *unused.begin();
}

TEST(PtxasRows, TheirOptionsAreThoseOfTheSource) {
  const ResolvedSpec spec = resolved({});
  const Arch& ada = find_arch("sm_89");
  KernelSpec wide = tiled_kernel(KernelKind::backward_dkv, spec, ada,
                                 default_tile(KernelKind::backward_dkv, spec, ada));
  EXPECT_EQ(emit(wide).options, std::vector<std::string>{"--ptxas-options=-O1"});
  wide.tile.family = Family::wgmma;
  EXPECT_EQ(ptxas_row(wide), nullptr);
}

} // namespace
