//===- packed_plan_test.cpp - Packed sequences: sizes, places, refusals ---===//
#include "generator/definition.h"
#include "generator/space.h"
#include "tests/generator/specs.h"

#include <algorithm>
#include <random>

using namespace sagebwd;
using test::expect_refusal;
using O = Operand;

namespace {

AttentionSpec packed_spec() {
  AttentionSpec s;
  s.packed = true;
  return s;
}

TEST(Packed, IsToldWhereItIs) {
  const std::string text = to_string(*resolved(packed_spec()));
  EXPECT_NE(text.find(" packed numerics="), std::string::npos) << text;
  EXPECT_EQ(parse_spec(text), *resolved(packed_spec()));
  EXPECT_EQ(to_string(*resolved(AttentionSpec())).find("packed"), std::string::npos);
}

/// templates/tile/walk/packed.cuh: sequence b begins at first[b] / size + b. No two share a place,
/// and the last ends within what the host allots.
TEST(Packed, EverySequenceHasItsPlaces) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    const int sequences = 1 + static_cast<int>(random() % 40), size = 1 << random() % 9;
    int64_t tokens = 0, taken = 0;
    for (int b = 0; b < sequences; ++b) {
      const int length =
          random() % 3 ? static_cast<int>(random() % 700) : static_cast<int>(random() % 2);
      const int64_t begin = tokens / size + b;
      ASSERT_GE(begin, taken);
      taken = begin + ceil_div(length, size);
      tokens += length;
    }
    const Problem p{sequences, 1, 1, tokens, tokens};
    ASSERT_LE(taken, places(Tokens::queries, size, packed_spec(), p));
  }
}

TEST(Packed, TheWorkspaceHasRoomForEveryDivision) {
  const Problem p = {5, 6, 3, 1000, 700}; // sequences, heads, tokens of all
  OperandValues values{};
  const ResolvedSpec spec = resolved(packed_spec());
  place_workspace(Pass::backward, spec, p, 0, values);
  const auto value = [&](O operand) { return static_cast<int>(get(values, operand)); };
  EXPECT_EQ(value(O::padded_q), (1000 / 128 + 5) * 128);
  EXPECT_EQ(value(O::padded_kv), (700 / 128 + 5) * 128);
  EXPECT_EQ(value(O::sequences), 5);
  EXPECT_EQ(value(O::seq_q), 1000);
  const auto bytes_of = [&](O operand) { // up to the next buffer
    const uint64_t begin = get(values, operand);
    uint64_t end = workspace_bytes(Pass::backward, spec, p);
    for (size_t i = 0; i < values.size(); ++i)
      if (type_of(static_cast<O>(i)).back() == '*' && values[i] > begin)
        end = std::min(end, values[i]);
    return static_cast<int64_t>(end - begin);
  };
  EXPECT_GE(bytes_of(O::k_mean), 5 * 3 * 128 * 4);
  EXPECT_GE(bytes_of(O::k_partial), 3 * (700 / 256 + 5) * 128 * 4);
  EXPECT_GE(bytes_of(O::q8), 6 * (1000 / 128 + 5) * 128 * 128);
  EXPECT_GE(bytes_of(O::v_rows), 3 * (700 / 128 + 5) * 128 * 128 * 2);
  EXPECT_GE(bytes_of(O::qt8_scale), 6 * (1000 / 256 + 5) * 2 * 128 * 4);
}

TEST(Packed, GridsDependOnTotalsAlone) {
  const Problem p = {5, 6, 3, 1000, 700};
  const auto grid = [&](KernelKind kind, Pass pass) {
    const Grid g = grid_of(test::kernel_of(kind, pass, packed_spec(), "sm_80"), p);
    return std::array<unsigned, 3>{g.x, g.y, g.z};
  };
  using Blocks = std::array<unsigned, 3>;
  EXPECT_EQ(grid(KernelKind::key_mean, Pass::forward), (Blocks{700 / 256 + 5, 3, 1}));
  EXPECT_EQ(grid(KernelKind::forward, Pass::forward), (Blocks{1000 / 64 + 5, 6, 1}));
  EXPECT_EQ(grid(KernelKind::backward_dkv, Pass::backward), (Blocks{700 / 64 + 5, 3, 1}));
  // 8 places for units of queries; for those of K, and of V, 7 among 2 query heads.
  EXPECT_EQ(grid(KernelKind::quantize, Pass::forward), (Blocks{8 + 2 * 4, 6, 1}));
}

TEST(Packed, MasksEdgesMoveWithLengthsButFromTheTopLeft) {
  const auto values_of = [](Causal causal, int left) {
    AttentionSpec s = packed_spec();
    s.causal = causal, s.window_left = left;
    OperandValues values{};
    place_workspace(Pass::forward, resolved(s), {2, 1, 1, 300, 500}, 0, values);
    return std::array<int, 3>{static_cast<int>(get(values, O::window_offset)),
                              static_cast<int>(get(values, O::causal_offset)),
                              static_cast<int>(get(values, O::diagonal_at_ends))};
  };
  EXPECT_EQ(values_of(Causal::top_left, 10), (std::array<int, 3>{-10, 0, 0}));
  EXPECT_EQ(values_of(Causal::bottom_right, 10), (std::array<int, 3>{-10, 0, 1}));
  EXPECT_EQ(values_of(Causal::none, 10), (std::array<int, 3>{-10, 800, 1}));
}

TEST(Packed, RefusalsSayWhatServes) {
  AttentionSpec s = packed_spec();
  s.granularity = Granularity::block;
  expect_refusal([&] { resolved(s); }, {"packed", "'block'", "'row'"});
  expect_refusal(
      [&] {
        check(resolved(packed_spec()), {2, 1, 1, 1 << 29, 1});
      },
      {"2^29", "queries of all sequences = 536870912"});
  EXPECT_NO_THROW(check(resolved(packed_spec()), {100000, 1, 1, 100000, 100000}));
}

} // namespace
