//===- route_test.cpp - Sums of blocks, and lists of the best ones ----------===//
//
// The oracle sorts a row's scores in FP64, and adds up tokens in FP64.
//
//===----------------------------------------------------------------------===//
#include "runtime/route_blocks.h"
#include "tests/gpu/device.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AttentionSpec routing_spec(int head_dim, DType dtype, int queries, int keys) {
  AttentionSpec spec;
  spec.head_dim = head_dim, spec.dtype = dtype;
  spec.sparse_q = queries, spec.sparse_kv = keys;
  return spec;
}

/// Rows of scores, and their lists.
class TopBlocks : public OnGpu, public testing::WithParamInterface<int> {
protected:
  using Bytes = std::vector<uint8_t>;
  using Words = std::vector<uint32_t>;
  const int blocks = GetParam();
  std::mt19937 draw{static_cast<unsigned>(GetParam())};

  /// By a stable sort: those that are always listed, and of the others the best.
  static Bytes expected_of(const float* scores, int blocks, int kept, const Bytes& always) {
    Bytes listed(always.begin(), always.end());
    listed.resize(blocks);
    int forced = 0;
    std::vector<int> order;
    for (int i = 0; i < blocks; ++i)
      if (listed[i] != 0)
        listed[i] = 1, ++forced;
      else if (scores[i] != -kInfinity)
        order.push_back(i);
    const auto height = [&](int i) { return double{scores[i]}; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      if (std::isnan(height(a)) || std::isnan(height(b)))
        return std::isnan(height(a)) && !std::isnan(height(b));
      return height(a) > height(b);
    });
    for (int i = 0; i < kept - forced && i < static_cast<int>(order.size()); ++i)
      listed[order[i]] = 1;
    return listed;
  }

  /// Both results of one call, or one after the other.
  void expect_lists(const std::vector<float>& scores, int kept, const Bytes& always = {},
                    bool together = true) {
    const AttentionSpec spec = routing_spec(64, DType::bf16, 64, 128);
    const Attention attention(spec, 0);
    const int64_t lists = static_cast<int64_t>(scores.size()) / blocks;
    // A last block may be short.
    const Problem p = {1, 1, 1, lists * spec.sparse_q - 5, int64_t{blocks} * spec.sparse_kv - 7};
    Buffer of_scores(scores.size() * 4), mask(scores.size());
    Buffer bits(lists * list_words(spec, p) * 4);
    of_scores.upload(scores);
    std::optional<Buffer> of_always;
    if (!always.empty())
      of_always.emplace(always.size()).upload(always);
    BlocksToList given{.problem = p, .scores = of_scores.as<float>(), .kept = kept};
    given.always = of_always ? of_always->as() : nullptr;
    given.mask = mask.as(), given.row_bits = together ? bits.as<uint32_t>() : nullptr;
    driver::synchronize();
    top_blocks(given, attention);
    given.mask = nullptr, given.row_bits = bits.as<uint32_t>();
    if (!together)
      top_blocks(given, attention);
    driver::synchronize();
    Faults faults;
    mask.check_guards("mask", faults), bits.check_guards("row_bits", faults);
    EXPECT_EQ(faults, Faults());
    const Bytes got = mask.download<uint8_t>();
    Words words(bits.bytes() / 4);
    for (int64_t row = 0; row < lists; ++row) {
      const Bytes listed = expected_of(&scores[row * blocks], blocks, kept, always);
      const Bytes of_row(got.begin() + row * blocks, got.begin() + (row + 1) * blocks);
      ASSERT_EQ(of_row, listed) << "row " << row << ", kept " << kept;
      for (int i = 0; i < blocks; ++i)
        words[row * (blocks / 32 + 1) + i / 32] |= uint32_t{listed[i]} << i % 32;
    }
    EXPECT_EQ(bits.download<uint32_t>(), words) << "kept " << kept;
  }

  /// So many rows, of numbers that `of` draws.
  template <typename Of> std::vector<float> rows(int count, const Of& of) {
    std::vector<float> scores(static_cast<size_t>(count) * blocks);
    for (float& score : scores)
      score = of();
    return scores;
  }
  float normal() { return std::normal_distribution<float>()(draw); }
  std::vector<int> numbers_kept() const {
    std::vector<int> kept = {1, std::max(1, blocks / 20), std::max(1, blocks / 2), blocks};
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
    return kept;
  }
};

TEST_P(TopBlocks, OfDifferentScores) {
  for (int kept : numbers_kept())
    expect_lists(rows(3, [&] { return normal(); }), kept);
  expect_lists(rows(1, [&] { return normal(); }), blocks + 3);
  expect_lists(rows(9, [&] { return normal(); }), std::max(1, blocks / 4), {}, false);
}

/// Scores that differ in their last bits alone, and of either sign.
TEST_P(TopBlocks, OfNeighbours) {
  for (int kept : numbers_kept())
    expect_lists(rows(2,
                      [&] {
                        const float score = std::nextafter(1.0f, draw() % 2 ? 2.0f : 0.0f);
                        return draw() % 2 ? score : -score;
                      }),
                 kept);
  expect_lists(rows(1, [&] { return (draw() % 2 ? 1 : -1) * 1e-45f * (draw() % 5); }),
               std::max(1, blocks / 3));
}

TEST_P(TopBlocks, OfEqualScoresTheFirst) {
  for (int kept : numbers_kept()) {
    expect_lists(rows(1, [] { return 0.5f; }), kept);
    expect_lists(rows(1, [] { return kNan; }), kept);
    expect_lists(rows(2, [&] { return float(draw() % 3) - 1; }), kept);
    expect_lists(rows(2, [&] { return draw() % 2 ? 0.0f : -0.0f; }), kept);
  }
}

TEST_P(TopBlocks, OfNanAndInfinities) {
  const auto drawn = [&](int of_each) {
    const float special[] = {kNan, -kNan, kInfinity, -kInfinity, -0.0f, 0.0f};
    const unsigned which = draw() % of_each;
    return which < std::size(special) ? special[which] : normal();
  };
  for (int kept : numbers_kept()) {
    expect_lists(rows(2, [&] { return drawn(6); }), kept);
    expect_lists(rows(2, [&] { return drawn(40); }), kept);
    expect_lists(rows(1, [] { return -kInfinity; }), kept);
    expect_lists(rows(1, [&] { return draw() % 4 ? -kInfinity : normal(); }), kept);
  }
}

/// Some are listed in any case: fewer and more than are kept, and of scores that never are.
TEST_P(TopBlocks, SomeAreAlwaysListed) {
  for (int of_each : {1, 3, 50}) {
    Bytes always(blocks);
    for (int i = 0; i < blocks; ++i)
      always[i] = i == blocks - 1 || draw() % of_each == 0 ? 1 + draw() % 255 : 0;
    for (int kept : numbers_kept())
      expect_lists(rows(2, [&] { return draw() % 5   ? normal()
                                        : draw() % 2 ? kNan
                                                     : -kInfinity; }),
                   kept, always);
  }
  expect_lists(rows(2, [&] { return normal(); }), std::max(1, blocks / 3), Bytes(blocks));
}

INSTANTIATE_TEST_SUITE_P(Gpu, TopBlocks,
                         testing::Values(1, 2, 31, 32, 33, 255, 256, 257, 500, 1000, 1024, 1025,
                                         5000));

struct PoolCase {
  const char* name;
  AttentionSpec spec;
  Problem problem;
  Layout layout;
};

class PoolBlocks : public OnGpu, public testing::WithParamInterface<PoolCase> {
protected:
  const AttentionSpec& spec() const { return GetParam().spec; }

  std::vector<float> drawn(int64_t heads, int64_t tokens, unsigned seed) const {
    std::mt19937 draw(seed);
    std::normal_distribution<float> normal(0.5f, 1);
    std::vector<float> values(heads * tokens * spec().head_dim);
    for (float& x : values)
      x = reference::round_to(spec().dtype, normal(draw));
    return values;
  }
  void expect_sums(const std::vector<float>& got, const std::vector<float>& x, int64_t tokens,
                   int64_t size) const {
    const int64_t d = spec().head_dim, blocks = ceil_div(tokens, size);
    std::vector<double> sums(got.size()), sizes(got.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const int64_t row = i / d, place = (row / tokens * blocks + row % tokens / size) * d + i % d;
      sums[place] += x[i], sizes[place] += std::abs(x[i]);
    }
    for (size_t i = 0; i < sums.size(); ++i)
      ASSERT_NEAR(got[i], sums[i], 2e-6 * sizes[i]) << "sum " << i;
  }
};

TEST_P(PoolBlocks, NearFp64) {
  const Problem& p = GetParam().problem;
  const Attention attention(spec(), 0);
  const std::vector<float> of_q = drawn(p.batch * p.heads, p.seq_q, 1);
  const std::vector<float> of_k = drawn(p.batch * p.heads_kv, p.seq_kv, 2);
  const int64_t d = spec().head_dim;
  DeviceTensor q(spec().dtype, p.batch, p.heads, p.seq_q, d, GetParam().layout, kPoison);
  DeviceTensor k(spec().dtype, p.batch, p.heads_kv, p.seq_kv, d, GetParam().layout, kPoison);
  q.upload(of_q), k.upload(of_k);
  Buffer of_queries(p.batch * p.heads * list_blocks(Tokens::queries, spec(), p) * d * 4);
  Buffer of_keys(p.batch * p.heads_kv * list_blocks(Tokens::keys, spec(), p) * d * 4);
  driver::synchronize();
  pool_blocks({.problem = p,
               .q = q.view(),
               .k = k.view(),
               .query_sums = of_queries.as<float>(),
               .key_sums = of_keys.as<float>()},
              attention);
  driver::synchronize();
  Faults faults;
  of_queries.check_guards("query_sums", faults), of_keys.check_guards("key_sums", faults);
  EXPECT_EQ(faults, Faults());
  expect_sums(of_queries.download<float>(), of_q, p.seq_q, spec().sparse_q);
  expect_sums(of_keys.download<float>(), of_k, p.seq_kv, spec().sparse_kv);
}

using enum DType;
const PoolCase kPoolCases[] = {
    {"D64_bf16_128x64", routing_spec(64, bf16, 128, 64), {2, 4, 2, 300, 200}, {true, 8}},
    {"D64_fp16_64x128", routing_spec(64, fp16, 64, 128), {1, 2, 1, 64, 128 * 3 + 1}, {}},
    {"D72_fp16_64x64", routing_spec(72, fp16, 64, 64), {2, 3, 1, 129, 127}, {false, 16}},
    {"D128_bf16_128x128", routing_spec(128, bf16, 128, 128), {1, 2, 2, 1, 256}, {false, 16}},
    {"D128_fp16_128x64", routing_spec(128, fp16, 128, 64), {2, 2, 1, 513, 130}, {true, 0}},
    {"D248_bf16_128x64", routing_spec(248, bf16, 128, 64), {1, 2, 1, 190, 100}, {true, 24}},
    {"D256_bf16_64x128", routing_spec(256, bf16, 64, 128), {1, 1, 1, 100, 300}, {}},
    {"D40_fp16_128x64", routing_spec(40, fp16, 128, 64), {3, 1, 1, 140, 70}, {}},
};
INSTANTIATE_TEST_SUITE_P(Gpu, PoolBlocks, testing::ValuesIn(kPoolCases),
                         [](const auto& info) { return std::string(info.param.name); });

class Router : public OnGpu {
protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped())
      return;
    attention.emplace(routing_spec(64, DType::bf16, 128, 64), 0);
    dense.emplace(AttentionSpec{.head_dim = 64}, 0);
  }

  std::optional<Attention> attention, dense;
  const Problem p = {1, 2, 1, 256, 128};

  template <typename Call> static void expect_refused(const std::string& why, const Call& call) {
    try {
      call();
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  }
};

TEST_F(Router, WrongListsAreRefused) {
  const BlocksToList sound{.problem = p,
                           .scores = reinterpret_cast<const float*>(0x1000),
                           .kept = 1,
                           .always = nullptr,
                           .mask = reinterpret_cast<void*>(0x2000),
                           .row_bits = reinterpret_cast<uint32_t*>(0x3000)};
  const auto refused = [&](const std::string& why, const auto& change) {
    BlocksToList changed = sound;
    change(changed);
    expect_refused(why, [&] { top_blocks(changed, *attention); });
  };
  refused("kept = 0", [](BlocksToList& a) { a.kept = 0; });
  refused("scores: the address is null", [](BlocksToList& a) { a.scores = nullptr; });
  refused("both null", [](BlocksToList& a) { a.mask = a.row_bits = nullptr; });
  refused("row_bits: the address is not a multiple of 4",
          [](BlocksToList& a) { a.row_bits = reinterpret_cast<uint32_t*>(0x3002); });
  refused("scores: the address is not a multiple of 4",
          [](BlocksToList& a) { a.scores = reinterpret_cast<const float*>(0x1001); });
  refused("mask", [](BlocksToList& a) { a.mask = reinterpret_cast<void*>(0x1003); });
  refused("always", [](BlocksToList& a) { a.always = reinterpret_cast<void*>(0x2001); });
  refused("heads = 0", [](BlocksToList& a) { a.problem.heads = 0; });
  refused("2^60 bytes", [](BlocksToList& a) { a.problem = {1 << 24, 65535, 1, 1 << 20, 1 << 20}; });
  expect_refused("top_blocks is called for a spec without lists",
                 [&] { top_blocks(sound, *dense); });
}

TEST_F(Router, WrongSumsAreRefused) {
  const auto at = [](uint64_t address) { return reinterpret_cast<float*>(address); };
  const BlocksToPool sound{.problem = p,
                           .q = {at(0x100000), 256 * 64 * 2, 256 * 64, 64},
                           .k = {at(0x200000), 128 * 64, 128 * 64, 64},
                           .query_sums = at(0x300000),
                           .key_sums = at(0x400000)};
  const auto refused = [&](const std::string& why, const auto& change) {
    BlocksToPool changed = sound;
    change(changed);
    expect_refused(why, [&] { pool_blocks(changed, *attention); });
  };
  refused("q: the address is null", [](BlocksToPool& a) { a.q.data = nullptr; });
  refused("k: the address is not", [&](BlocksToPool& a) { a.k.data = at(0x200008); });
  refused("the token stride is 68", [](BlocksToPool& a) { a.q.stride_s = 68; });
  refused("query_sums: the address is null", [](BlocksToPool& a) { a.query_sums = nullptr; });
  refused("key_sums: the address is not", [&](BlocksToPool& a) { a.key_sums = at(0x400002); });
  refused("key_sums", [&](BlocksToPool& a) { a.key_sums = at(0x200400); });
  refused("query_sums", [&](BlocksToPool& a) { a.key_sums = at(0x300200); });
  refused("2^31 - 1 at most", [](BlocksToPool& a) { a.problem = {1 << 24, 256, 1, 1, 1}; });
  expect_refused("pool_blocks is called for a spec without lists",
                 [&] { pool_blocks(sound, *dense); });
}

} // namespace
