//===- lists_test.cpp - Queries that see listed blocks of keys alone --------===//
#include "tests/gpu/listed.h"

#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using reference::Inputs;

class Listed : public CaseTest {
protected:
  const AttentionSpec& spec() const { return attention->spec(); }

  void expect_close(const Inputs& in, const reference::Outputs<float>& got,
                    bool few = false) const {
    test::expect_close(spec(), in, got, few);
  }
};

TEST_P(Listed, EveryBlockGivesTheBitsOfTheDenseKernels) {
  AttentionSpec dense = spec();
  dense.sparse_q = dense.sparse_kv = 0;
  dense.gradient_kernels = Backward::split;
  const Problem whole = {1, 1, 1, 512, 512};
  Tiles tiles;
  for (KernelKind kind : tiled_kernels())
    tiles[kind] = attention->tile(kind, whole);
  if (TileConfig& dkv = tiles[KernelKind::backward_dkv]; dkv.stages == 0 && spec().head_dim <= 128)
    dkv.stages = 1; // parts take turns for lists alone
  Attention with_all(dense, 0, tiles);
  for (const Problem& p : {Problem{1, 2, 1, 130, 700}, Problem{2, 2, 2, 257, 65}}) {
    Inputs in = listed_inputs(spec(), p, 1);
    Inputs without_lists = in;
    without_lists.listed.clear();
    expect_identical(run(*attention, in), run(with_all, without_lists));
  }
}

TEST_P(Listed, NearExactAndEmulated) {
  // Few blocks of many queries, and many of many keys.
  for (const auto& [density, m, n] : {std::tuple{0.15, 600, 700}, {0.5, 300, 1100}}) {
    SCOPED_TRACE(density);
    const Inputs in = listed_inputs(spec(), {1, 2, 1, m, n}, density);
    expect_close(in, run(*attention, in));
  }
}

TEST_P(Listed, OddLengths) {
  for (const auto& [m, n] : {std::pair{1, 63}, {65, 129}, {300, 65}, {129, 600}}) {
    SCOPED_TRACE("M = " + std::to_string(m) + ", N = " + std::to_string(n));
    Inputs in = listed_inputs(spec(), {2, 2, 1, m, n}, 0.4);
    expect_close(in, run(*attention, in), /*few=*/true);
  }
}

/// Lists of nothing, of everything, of one block alone; blocks that nobody and that everybody
/// lists.
TEST_P(Listed, EmptyAndFullRowsAndColumns) {
  const Problem p = {1, 2, 1, 650, 700};
  Inputs in = listed_inputs(spec(), p, 0.3);
  const int64_t lists = lists_of(spec(), p), blocks = blocks_of(spec(), p);
  for (int64_t i = 0; i < p.heads * lists; ++i)
    for (int64_t j = 0; j < blocks; ++j) {
      uint8_t& listed = in.listed[i * blocks + j];
      const int64_t list = i % lists;
      listed = list == 0 || list == 5 || j == 3 ? 0
               : list == 1 || j == 1            ? 1
               : list == 2                      ? j == blocks - 1
                                                : listed;
    }
  const auto got = run(*attention, in);
  expect_close(in, got);
  const int64_t d = spec().head_dim;
  for (int64_t head = 0; head < p.heads; ++head)
    for (int64_t i = 0; i < spec().sparse_q; ++i) {
      const int64_t query = head * p.seq_q + i;
      ASSERT_EQ(got.lse[query], -INFINITY);
      for (int64_t c = 0; c < d; ++c) {
        ASSERT_EQ(got.o[query * d + c], 0);
        ASSERT_EQ(got.dq[query * d + c], 0);
      }
    }
  for (int64_t head = 0; head < p.heads_kv; ++head)
    for (int64_t key = 3 * spec().sparse_kv; key < 4 * spec().sparse_kv; ++key)
      for (int64_t c = 0; c < d; ++c) {
        ASSERT_EQ(got.dk[(head * p.seq_kv + key) * d + c], 0);
        ASSERT_EQ(got.dv[(head * p.seq_kv + key) * d + c], 0);
      }
}

/// One late block of keys is in every list, the others in few: dK's and dV's blocks begin in
/// another order than that of the keys.
TEST_P(Listed, PopularBlocks) {
  const Problem p = {1, 4, 2, 520, 700};
  Inputs in = listed_inputs(spec(), p, 0.03);
  const int64_t blocks = blocks_of(spec(), p), popular = blocks - 2;
  double all = 0;
  for (size_t i = 0; i < in.listed.size(); ++i) {
    if (static_cast<int64_t>(i) % blocks == popular)
      in.listed[i] = 1;
    all += in.listed[i];
  }
  const double longest = 2.0 * lists_of(spec(), p), lists = 2.0 * blocks;
  ASSERT_GE(longest, 2 * (std::floor(all / lists) + 1)) << "the order is that of the keys";
  expect_close(in, run(*attention, in));
}

/// One block of each 256 keys, whose values are of another size than those before: each block's
/// scales have to have come when it is their turn.
TEST_F(OnGpu, ScalesComeForRunsOfOneTile) {
  AttentionSpec spec{64, DType::bf16, Causal::bottom_right};
  spec.sparse_q = spec.sparse_kv = 128;
  Attention attention(spec); // two stages on sm_90a
  const Problem p = {1, 1, 1, 128, 1536};
  Inputs in = listed_inputs(attention.spec(), p, 1);
  for (int64_t key = 0; key < p.seq_kv; ++key) {
    in.listed[key / 128] = key / 128 % 2 == 0;
    for (int64_t c = 0; c < 64; ++c)
      in.v[key * 64 + c] *= key / 256 % 2 ? 16 : 1;
  }
  expect_close(attention.spec(), in, run(attention, in));
}

class LongLists : public Listed {};

/// A list has several words: of keys, of which one list names none in the words between; of
/// queries, where few keys have as many lists.
TEST_P(LongLists, SkipWords) {
  const int64_t queries = spec().sparse_q, keys = spec().sparse_kv;
  {
    SCOPED_TRACE("many keys");
    const Problem p = {1, 1, 1, 2 * queries + 3, 66 * keys - 7};
    Inputs in = listed_inputs(spec(), p, 0.03);
    const int64_t blocks = blocks_of(spec(), p);
    for (int64_t j = 0; j < blocks; ++j)
      in.listed[blocks + j] = j == 31 || j >= 63;
    expect_close(in, run(*attention, in));
  }
  SCOPED_TRACE("many queries");
  const Problem p = {1, 2, 1, 66 * queries + 3, 2 * keys - 7};
  Inputs in = listed_inputs(spec(), p, 0.1);
  const int64_t blocks = blocks_of(spec(), p), lists = lists_of(spec(), p);
  for (int64_t list = 0; list < lists; ++list) // the second block's; each list has a block
    in.listed[list * blocks] = !(in.listed[list * blocks + 1] = list == 31 || list >= 63);
  expect_close(in, run(*attention, in));
}

/// If a GPU has many blocks to work on, each takes several lists. Results are those of calls with
/// so few that each takes one.
TEST_P(LongLists, ManySequences) {
  const int64_t batch = ceil_div(4 * driver::device_info(0).sm_count, 10);
  const Problem p = {batch, 2, 1, 9 * spec().sparse_q - 5, 5 * spec().sparse_kv - 7};
  Inputs in = listed_inputs(spec(), p, 0.5);
  std::fill_n(in.listed.begin() + 2 * blocks_of(spec(), p), blocks_of(spec(), p), 0);
  const auto got = run(*attention, in);
  for (int64_t b : {int64_t{0}, batch - 1}) {
    const auto part = [&](const auto& of_all) {
      const int64_t size = of_all.size() / batch;
      return std::decay_t<decltype(of_all)>(of_all.begin() + b * size,
                                            of_all.begin() + (b + 1) * size);
    };
    Inputs one = in;
    one.problem.batch = 1, one.listed = part(in.listed);
    for (auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout})
      one.*tensor = part(in.*tensor);
    const auto alone = run(*attention, one);
    for (auto result : {&reference::Outputs<float>::o, &reference::Outputs<float>::lse,
                        &reference::Outputs<float>::dq, &reference::Outputs<float>::dk,
                        &reference::Outputs<float>::dv})
      EXPECT_EQ(part(got.*result), alone.*result);
  }
}

TEST_P(Listed, ListsThatHeadsShare) {
  Inputs in = listed_inputs(spec(), {2, 4, 2, 130, 129}, 0.4);
  share_lists(spec(), in);
  const auto apart = run(*attention, in);
  RunOptions shared;
  const std::vector<uint32_t> bits = packed_lists(spec(), in);
  shared.row_bits.assign(bits.begin(), bits.begin() + bits.size() / (2 * 4));
  expect_identical(run(*attention, in, shared), apart);
}

TEST_P(Listed, GradientThroughLse) {
  Inputs in = listed_inputs(spec(), {1, 2, 1, 320, 320}, 0.4);
  if (spec().smooth_k)
    for (float& x : in.k)
      x = reference::round_to(spec().dtype, x + 2);
  in.dlse.resize(in.problem.heads * in.problem.seq_q);
  for (size_t i = 0; i < in.dlse.size(); ++i)
    in.dlse[i] = std::sin(static_cast<float>(i) * 1.7f);
  expect_close(in, run(*attention, in));
}

/// Lists as the packing kernels write them, of a problem's queries and keys.
class PackedLists : public Listed {
protected:
  struct Lists {
    std::vector<int32_t> indices, counts;
    int width = 0;
  };
  /// The inputs' lists by number, in another order, some twice, and more that do not count.
  Lists indices_of(const Inputs& in) const {
    const int64_t blocks = blocks_of(spec(), in.problem);
    Lists lists;
    lists.width = static_cast<int>(2 * blocks + 3);
    std::mt19937 draw(11);
    for (size_t row = 0; row < in.listed.size() / blocks; ++row) {
      std::vector<int32_t> of_row;
      for (int64_t j = 0; j < blocks; ++j)
        for (int times = in.listed[row * blocks + j] ? 1 + draw() % 2 : 0; times > 0; --times)
          of_row.push_back(static_cast<int32_t>(j));
      std::shuffle(of_row.begin(), of_row.end(), draw);
      lists.counts.push_back(static_cast<int32_t>(of_row.size()));
      of_row.resize(lists.width, -7);
      lists.indices.insert(lists.indices.end(), of_row.begin(), of_row.end());
    }
    return lists;
  }
  std::vector<uint32_t> packed(const Problem& p, const Lists* lists, const Inputs* mask) const {
    const int64_t rows = p.batch * p.heads * lists_of(spec(), p);
    Buffer bits(rows * list_words(spec(), p) * sizeof(uint32_t));
    ListsToPack from{.problem = p, .row_bits = bits.as<uint32_t>()};
    std::optional<Buffer> given, counts;
    if (mask) {
      given.emplace(mask->listed.size()).upload(mask->listed);
      from.mask = given->as();
    } else {
      given.emplace(lists->indices.size() * 4).upload(lists->indices);
      from.indices = given->as<int32_t>(), from.width = lists->width;
      if (!lists->counts.empty()) {
        counts.emplace(lists->counts.size() * 4).upload(lists->counts);
        from.counts = counts->as<int32_t>();
      }
    }
    driver::synchronize();
    attention->pack_lists(from);
    driver::synchronize();
    Faults faults;
    bits.check_guards("row_bits", faults);
    EXPECT_EQ(faults, Faults());
    return bits.download<uint32_t>();
  }
};

TEST_P(PackedLists, MasksAndIndicesInAnyOrderGiveTheSameBits) {
  for (const int64_t n : {63, 1000, 64 * 31, 128 * 32, 64 * 65 + 1}) {
    SCOPED_TRACE("N = " + std::to_string(n));
    Inputs in; // of lists alone, without queries and keys
    in.problem = {2, 3, 1, 300, n};
    in.listed = reference::random_lists(spec(), in.problem, 0.3, 5);
    const std::vector<uint32_t> expected = packed_lists(spec(), in);
    EXPECT_EQ(packed(in.problem, nullptr, &in), expected);
    const Lists lists = indices_of(in);
    EXPECT_EQ(packed(in.problem, &lists, nullptr), expected);
  }
}

TEST_P(PackedLists, WrongArgumentsAreRefused) {
  const Problem p = {1, 1, 1, 64, 64};
  const auto expect_refused = [&](const Attention& operation, const ListsToPack& lists,
                                  const std::string& why) {
    try {
      operation.pack_lists(lists);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  Buffer memory(4096);
  const auto* indices = memory.as<int32_t>();
  auto* bits = memory.as<uint32_t>();
  expect_refused(*attention, {.problem = p, .row_bits = bits}, "one of the two");
  expect_refused(*attention,
                 {.problem = p, .mask = indices, .indices = indices, .width = 1, .row_bits = bits},
                 "one of the two");
  expect_refused(*attention, {.problem = p, .indices = indices, .row_bits = bits}, "width = 0");
  expect_refused(*attention, {.problem = p, .mask = indices}, "row_bits: the address is null");
  expect_refused(Attention({64}, 0), {.problem = p, .mask = indices, .row_bits = bits},
                 "a spec that has none");
  Inputs in = listed_inputs(spec(), p, 1);
  Operands operands(*attention, in);
  ForwardArgs without = operands.forward;
  without.lists.row_bits = nullptr;
  try {
    attention->forward(without);
    ADD_FAILURE() << "no lists are accepted";
  } catch (const SpecError& error) {
    EXPECT_NE(std::string(error.what()).find("pack_lists()"), std::string::npos) << error.what();
  }
  in.listed.clear();
  Attention dense({64}, 0);
  Operands of_dense(dense, in);
  of_dense.forward.lists = operands.forward.lists;
  try {
    dense.forward(of_dense.forward);
    ADD_FAILURE() << "lists are ignored";
  } catch (const SpecError& error) {
    EXPECT_NE(std::string(error.what()).find("sparse_q"), std::string::npos) << error.what();
  }
}

/// The queries of lists that name a block which does not exist, and no others, get NaN.
TEST_P(PackedLists, WrongListsGiveNan) {
  const Problem p = {1, 2, 2, 450, 300};
  Inputs in = listed_inputs(spec(), p, 0.5);
  const int64_t lists = lists_of(spec(), p), blocks = blocks_of(spec(), p);
  Lists given = indices_of(in);
  const auto entry = [&](int64_t list, int i) -> int32_t& {
    return given.indices[list * given.width + i];
  };
  entry(1, 0) = static_cast<int32_t>(blocks), given.counts[1] = std::max(given.counts[1], 1);
  entry(3, 0) = -1, given.counts[3] = 1; // no other block
  given.counts[lists] = -2;              // of the second head
  for (int i = 0; i < given.width; ++i)
    entry(lists + 2, i) = 0; // so that nothing but the count is wrong
  given.counts[lists + 2] = given.width + 1;
  const std::set<int64_t> wrong = {1, 3, lists, lists + 2};
  RunOptions options;
  options.row_bits = packed(p, &given, nullptr);
  const auto got = run(*attention, in, options);
  const auto sound = run(*attention, in);
  const int64_t d = spec().head_dim;
  for (int64_t i = 0; i < p.heads * p.seq_q; ++i) {
    const int64_t list = i / p.seq_q * lists + i % p.seq_q / spec().sparse_q;
    if (!wrong.contains(list)) {
      ASSERT_EQ(got.lse[i], sound.lse[i]) << "query " << i;
      continue;
    }
    ASSERT_TRUE(std::isnan(got.lse[i])) << "query " << i;
    for (int64_t c = 0; c < d; ++c)
      ASSERT_TRUE(std::isnan(got.o[i * d + c])) << "query " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, Listed, testing::ValuesIn(sparse_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Gpu, LongLists,
                         testing::ValuesIn(sparse_cases({"D64_bf16_128x64",
                                                         "D64_bf16_128x128_BottomRight_Ws"})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(
    Gpu, PackedLists,
    testing::ValuesIn(sparse_cases({"D64_bf16_128x64", "D64_fp16_64x128_TopLeft"})), case_name);

} // namespace
