//===- listed.h - Calls with lists of blocks, and their kernels -------------===//
#pragma once

#include "tests/gpu/cases.h"
#include "tests/gpu/operation.h"

#include <set>

namespace sagebwd::test {

inline int64_t lists_of(const AttentionSpec& s, const Problem& p) {
  return list_blocks(Tokens::queries, s, p);
}
inline int64_t blocks_of(const AttentionSpec& s, const Problem& p) {
  return list_blocks(Tokens::keys, s, p);
}

/// Inputs whose lists have each block with this probability.
inline reference::Inputs listed_inputs(const AttentionSpec& spec, const Problem& p,
                                       double density) {
  reference::Inputs in = reference::random_inputs(p, spec.head_dim, spec.dtype, 1, 7);
  in.listed = reference::random_lists(spec, p, density, 5);
  return in;
}

/// Gives all heads and sequences of the inputs the lists of the first one.
inline void share_lists(const AttentionSpec& spec, reference::Inputs& in) {
  const int64_t of_head = lists_of(spec, in.problem) * blocks_of(spec, in.problem);
  for (size_t i = of_head; i < in.listed.size(); ++i)
    in.listed[i] = in.listed[i % of_head];
}

/// Relative L2 to FP64 and to the emulation. One flipped rounding weighs more in `few` numbers,
/// as Numerics.AnyLengths has it.
inline void expect_close(const AttentionSpec& spec, const reference::Inputs& in,
                         const reference::Outputs<float>& got, bool few = false) {
  const auto exact = reference::exact(in, spec);
  const bool row = spec.granularity == Granularity::row;
  EXPECT_LE(distance(got.o, exact.o).relative(), few ? 0.2 : row ? 0.02 : 0.03);
  EXPECT_LE(distance(got.dq, exact.dq).relative(), few ? 0.2 : row ? 0.03 : 0.08);
  EXPECT_LE(distance(got.dk, exact.dk).relative(), few ? 0.2 : row ? 0.03 : 0.08);
  EXPECT_LE(distance(got.dv, exact.dv).relative(), few ? 0.2 : row ? 0.02 : 0.05);
  const auto emulated = emulate_like(spec, in, got);
  const double limit = few ? 0.02 : row ? kEmulationLimit : kBlockEmulationLimit;
  EXPECT_LE(distance(got.o, emulated.o).relative(), limit);
  EXPECT_LE(distance(got.dq, emulated.dq).relative(), limit);
  EXPECT_LE(distance(got.dk, emulated.dk).relative(), limit);
  EXPECT_LE(distance(got.dv, emulated.dv).relative(), limit);
  for (size_t i = 0; i < exact.lse.size(); ++i)
    if (std::isinf(exact.lse[i]))
      ASSERT_EQ(got.lse[i], exact.lse[i]) << "query " << i;
    else
      ASSERT_NEAR(got.lse[i], exact.lse[i], 0.1) << "query " << i;
}

/// Every option that lists have, with every size of a block at least once.
inline std::vector<Case> sparse_cases(const std::set<std::string>& named = {}) {
  using enum DType;
  using enum Granularity;
  using enum Precision;
  constexpr Causal none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  struct Sparse {
    const char* name;
    AttentionSpec spec;
    int queries, keys; ///< of a block
  };
  const Sparse all[] = {
      {"D64_bf16_128x64", {64, bf16, none, row}, 128, 64},
      {"D64_fp16_64x128_TopLeft", {64, fp16, top, row}, 64, 128},
      {"D128_bf16_128x64_BottomRight", {128, bf16, bottom, row}, 128, 64},
      {"D128_fp16_128x128", {128, fp16, none, row}, 128, 128},
      {"D128_bf16_128x128_Gradients16_BottomRight",
       {128, bf16, bottom, row, gradients16},
       128,
       128},
      {"D128_bf16_64x64_Qk16", {128, bf16, none, row, qk16}, 64, 64},
      {"D64_bf16_64x128_Qk16", {64, bf16, none, row, qk16}, 64, 128}, // two blocks share a list
      {"D64_bf16_128x128_Groups64_TopLeft",
       {64, bf16, top, row, six_of_seven, true, true, true, 64, 64},
       128,
       128},
      {"D128_bf16_128x64_Gradients16", {128, bf16, none, row, gradients16}, 128, 64},
      {"D64_bf16_128x64_Block_TopLeft", {64, bf16, top, block}, 128, 64},
      {"D72_fp16_128x128_Dv16", {72, fp16, none, row, dv16, false}, 128, 128},
      {"D256_bf16_128x64", {256, bf16, none, row}, 128, 64},
      {"D64_bf16_128x64_HalfDp", {64, bf16, none, row}, 128, 64},
      {"D64_bf16_128x128_BottomRight_Ws", {64, bf16, bottom, row}, 128, 128},
      {"D64_fp16_128x64_BottomRight_Mma", {64, fp16, bottom, row}, 128, 64},
      {"D128_bf16_128x64_TopLeft_Turns", {128, bf16, top, row}, 128, 64},
  };
  std::vector<Case> cases;
  for (const Sparse& s : all) {
    Case c{s.name, s.spec, {}};
    c.spec.sparse_q = s.queries, c.spec.sparse_kv = s.keys;
    if (c.name.ends_with("HalfDp"))
      c.spec.dp_sums = DpSums::fp16, c.tiles = mma_tiles(c.spec);
    if (c.name.ends_with("Ws"))
      c.tiles = family_tiles(c.spec, Family::ws);
    if (c.name.ends_with("Mma") || c.name.ends_with("Turns"))
      c.tiles = mma_tiles(c.spec);
    if (c.name.ends_with("Turns"))
      (*c.tiles)[KernelKind::backward_dkv] = parse_tile("mma 64x64 w4 s0 b2");
    if (named.empty() || named.contains(c.name))
      cases.push_back(c);
  }
  return cases;
}

} // namespace sagebwd::test
