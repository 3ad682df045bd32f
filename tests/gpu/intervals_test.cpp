//===- intervals_test.cpp - Keys that some queries do not see ---------------===//
#include "tests/gpu/listed.h"

#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using reference::Inputs;

/// Numbers of keys as they come, some of which hide no query and some all; the same ones for the
/// second and third 64 keys, so that there are blocks that nobody sees, and some queries
/// from `blind` on see no key at all if that is not negative.
std::vector<int32_t> drawn_intervals(const AttentionSpec& spec, const Problem& p, int64_t heads,
                                     uint64_t seed, int blind = -1) {
  std::mt19937_64 random(seed);
  const auto queries = static_cast<int32_t>(p.seq_q);
  const bool causal = spec.causal != Causal::none;
  const auto any = [&] {
    return std::uniform_int_distribution<int32_t>(-20, queries + 20)(random);
  };
  std::vector<int32_t> numbers;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t key = 0; key < p.seq_kv; ++key) {
      std::vector<int32_t> of(spec.intervals);
      for (int32_t& number : of)
        number = any();
      const int kind = std::uniform_int_distribution(0, 5)(random);
      const bool of_block = key >= 64 && key < 192 && head == 0;
      if (kind == 0 || (spec.intervals == 2 && !causal)) // none, or few at both ends
        of = spec.intervals == 1   ? std::vector{queries}
             : causal              ? std::vector{queries, queries}
             : spec.intervals == 2 ? std::vector{queries - of[0] % 90 % queries, of[1] % 90}
                                   : std::vector{queries, queries, 0, 0};
      if (of_block) // all of the first 200
        of = spec.intervals == 1   ? std::vector{0}
             : causal              ? std::vector{0, 200}
             : spec.intervals == 2 ? std::vector{queries, 200}
                                   : std::vector{0, 200, 0, 0};
      if (key >= 256 && key < 384 && head == 0) { // begin on both sides of a block's first query
        const auto begin = static_cast<int32_t>(100 + key % 70);
        of = spec.intervals == 1   ? std::vector{begin}
             : causal              ? std::vector{begin, queries}
             : spec.intervals == 2 ? std::vector{begin, 0}
                                   : std::vector{begin, queries, 0, 0};
      }
      if (blind >= 0)
        of = spec.intervals == 1   ? std::vector{blind}
             : causal              ? std::vector{blind, blind + 70}
             : spec.intervals == 2 ? std::vector{queries, blind + 70}
                                   : std::vector{of[0], of[1], blind, blind + 70};
      numbers.insert(numbers.end(), of.begin(), of.end());
    }
  return numbers;
}

Inputs inputs_with_intervals(const AttentionSpec& spec, const Problem& p, int blind = -1) {
  Inputs in = reference::random_inputs(p, spec.head_dim, spec.dtype, 1, 7);
  in.intervals = drawn_intervals(spec, p, p.batch * p.heads_kv, 11, blind);
  return in;
}

/// Every option that intervals have, with each number of numbers.
std::vector<Case> interval_cases() {
  using enum DType;
  using enum Granularity;
  using enum Precision;
  constexpr Causal none = Causal::none, top = Causal::top_left, bottom = Causal::bottom_right;
  struct {
    const char* name;
    AttentionSpec spec;
    int intervals;
    int queries = 0, keys = 0; ///< of a block of scores that may be left out
  } const all[] = {
      {"D64_bf16_4", {64, bf16, none, row}, 4},
      {"D64_bf16_4_Ws", {64, bf16, none, row}, 4},
      {"D64_bf16_4_128x64", {64, bf16, none, row}, 4, 128, 64},
      {"D64_fp16_2_TopLeft_Mma", {64, fp16, top, row}, 2},
      {"D64_bf16_1_BottomRight", {64, bf16, bottom, row}, 1},
      {"D64_bf16_1_BottomRight_64x64_Mma", {64, bf16, bottom, row}, 1, 64, 64},
      {"D64_bf16_2_Gradients16", {64, bf16, none, row, gradients16}, 2},
      {"D64_fp16_1_TopLeft_Qk16", {64, fp16, top, row, qk16}, 1},
      {"D64_bf16_4_Dv16_Mma", {64, bf16, none, row, dv16}, 4},
      {"D64_bf16_2_TopLeft_Block", {64, bf16, top, block}, 2},
      {"D64_bf16_4_Block_Mma", {64, bf16, none, block}, 4},
      {"D64_bf16_2_HalfDp_Mma", {64, bf16, none, row}, 2},
      {"D128_bf16_1_TopLeft", {128, bf16, top, row}, 1},
      {"D128_bf16_2_BottomRight_Mma", {128, bf16, bottom, row}, 2},
      {"D128_fp16_4_Gradients16", {128, fp16, none, row, gradients16}, 4},
      {"D72_fp16_2_BottomRight", {72, fp16, bottom, row}, 2},
      {"D256_bf16_4", {256, bf16, none, row}, 4},
      {"D256_bf16_1_TopLeft_Gradients16_Mma", {256, bf16, top, row, gradients16}, 1},
  };
  std::vector<Case> cases;
  for (const auto& given : all) {
    Case c{given.name, given.spec, {}};
    c.spec.intervals = given.intervals;
    c.spec.sparse_q = given.queries, c.spec.sparse_kv = given.keys;
    if (c.name.find("HalfDp") != std::string::npos)
      c.spec.dp_sums = DpSums::fp16;
    if (c.name.ends_with("Mma"))
      c.tiles = mma_tiles(c.spec);
    if (c.name.ends_with("Ws"))
      c.tiles = family_tiles(c.spec, Family::ws);
    cases.push_back(c);
  }
  return cases;
}

class WithIntervals : public CaseTest {
protected:
  const AttentionSpec& spec() const { return attention->spec(); }
};

TEST_P(WithIntervals, NearExactAndEmulated) {
  for (const Problem& p : {Problem{1, 2, 1, 600, 700}, Problem{2, 2, 2, 300, 330}}) {
    const Inputs in = inputs_with_intervals(spec(), p);
    expect_close(spec(), in, run(*attention, in));
  }
}

TEST_P(WithIntervals, OddLengths) {
  for (const auto& [m, n] : {std::pair{1, 63}, {65, 129}, {300, 65}, {129, 33}}) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    const Inputs in = inputs_with_intervals(spec(), {1, 2, 1, m, n});
    expect_close(spec(), in, run(*attention, in), /*few=*/true);
  }
}

/// Kernels ask about no single score where nothing is hidden, or whole blocks are.
TEST_P(WithIntervals, WholeBlocksGiveTheBitsOfLists) {
  AttentionSpec lists = spec();
  lists.intervals = 0;
  lists.gradient_kernels = Backward::split;
  Tiles tiles;
  const Problem p = {1, 2, 1, 384, 500};
  for (KernelKind kind : tiled_kernels())
    tiles[kind] = attention->tile(kind, p);
  Attention with_lists(lists, 0, tiles);
  Inputs in = inputs_with_intervals(spec(), p), listed = in;
  listed.intervals.clear();
  listed.listed.assign(p.heads * lists_of(lists, p) * blocks_of(lists, p), 1);
  const auto queries = static_cast<int32_t>(p.seq_q);
  const int columns = spec().intervals;
  const bool causal = spec().causal != Causal::none;
  for (int64_t key = 0; key < p.seq_kv; ++key) {
    const int64_t block = key / spec().sparse_kv;
    const int32_t end = block % 3 == 0 ? 256 : 0; // the first two blocks of queries, or none
    const std::vector<int32_t> all[] = {
        {queries}, causal ? std::vector{0, end} : std::vector{queries, end}, {0, end, 5, 5}};
    const std::vector<int32_t>& of = all[columns / 2];
    std::copy(of.begin(), of.end(), in.intervals.begin() + key * columns);
    for (int64_t list = 0; list < p.heads * lists_of(lists, p); ++list)
      if (columns > 1 && list % lists_of(lists, p) * spec().sparse_q < end)
        listed.listed[list * blocks_of(lists, p) + block] = 0;
  }
  const auto got = run(*attention, in), expected = run(with_lists, listed);
  if (tiles.at(KernelKind::forward).family != Family::mma)
    return expect_identical(got, expected);
  // ptxas makes one rounding of two in kernels of mma.sync over lists, and none here, at level 1.
  const double limit =
      spec().granularity == Granularity::row ? kEmulationLimit : kBlockEmulationLimit;
  for (const auto part : {&reference::Outputs<float>::o, &reference::Outputs<float>::dq,
                          &reference::Outputs<float>::dk, &reference::Outputs<float>::dv})
    EXPECT_LE(distance(got.*part, expected.*part).relative(), limit);
}

TEST_P(WithIntervals, QueriesThatSeeNothing) {
  const Problem p = {1, 2, 1, 330, 400};
  const int blind = 90;
  const int64_t end = spec().intervals == 1 ? p.seq_q : blind + 70;
  const bool from_first = spec().intervals == 2 && spec().causal == Causal::none;
  const Inputs in = inputs_with_intervals(spec(), p, blind);
  const auto got = run(*attention, in);
  expect_close(spec(), in, got);
  const int64_t d = spec().head_dim;
  for (int64_t head = 0; head < p.heads; ++head)
    for (int64_t i = from_first ? 0 : blind; i < end; ++i) {
      const int64_t query = head * p.seq_q + i;
      ASSERT_EQ(got.lse[query], -INFINITY);
      for (int64_t c = 0; c < d; ++c) {
        ASSERT_EQ(got.o[query * d + c], 0);
        ASSERT_EQ(got.dq[query * d + c], 0);
      }
    }
}

/// Heads and sequences that share their numbers have the results of copies.
TEST_P(WithIntervals, SharedOnes) {
  const Problem p = {2, 4, 2, 200, 260};
  Inputs in = reference::random_inputs(p, spec().head_dim, spec().dtype, 1, 7);
  const std::vector<int32_t> one = drawn_intervals(spec(), p, 1, 3);
  in.intervals = one;
  in.heads_share_intervals = in.sequences_share_intervals = true;
  Inputs copied = in;
  copied.heads_share_intervals = copied.sequences_share_intervals = false;
  for (int i = 1; i < 4; ++i)
    copied.intervals.insert(copied.intervals.end(), one.begin(), one.end());
  expect_identical(run(*attention, in), run(*attention, copied));
}

TEST_P(WithIntervals, GradientThroughLse) {
  const Problem p = {1, 2, 1, 330, 400};
  Inputs in = inputs_with_intervals(spec(), p, 90);
  in.dlse =
      reference::random_inputs({1, 1, 1, p.heads * p.seq_q / 5 + 1, 1}, 64, spec().dtype, 1, 9).q;
  in.dlse.resize(p.heads * p.seq_q);
  expect_close(spec(), in, run(*attention, in));
}

/// Words of lists say which blocks somebody sees and, behind each, where scores are asked about.
TEST_F(OnGpu, OneHoleMarksItsBlockAlone) {
  AttentionSpec spec{64, DType::bf16, Causal::top_left};
  spec.intervals = 2;
  const Attention attention(spec);
  const Problem p = {1, 1, 1, 512, 500};
  Inputs in = reference::random_inputs(p, 64, DType::bf16, 1, 7);
  for (int key = 0; key < p.seq_kv; ++key) {
    const bool hole = key == 5, gone = key >= 256 && key < 384; // all of a block
    in.intervals.push_back(hole ? 130 : gone ? 100 : 512);
    in.intervals.push_back(hole ? 140 : gone ? 400 : 512);
  }
  const Operands operands(attention, in);
  driver::synchronize();
  EXPECT_EQ(operands.row_bits->download<uint32_t>(),
            (std::vector<uint32_t>{0b1111, 0b0100, 0b1011, 0b0001, 0b1011, 0, 0b1111, 0b0100}));
}

INSTANTIATE_TEST_SUITE_P(Gpu, WithIntervals, testing::ValuesIn(interval_cases()), case_name);

} // namespace
