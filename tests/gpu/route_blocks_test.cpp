//===- route_blocks_test.cpp - Lists of the best blocks, from Q and K ---------===//
//
// The oracle forms means, maps and scores in FP64. Of scores that FP32 cannot part either may be
// listed; where they are whole numbers, lists are those of a stable sort.
//
//===----------------------------------------------------------------------===//
#include "runtime/route_blocks.h"
#include "tests/gpu/device.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <numeric>
#include <random>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

enum class Maps { none, shared, per_head };

struct RouteCase {
  const char* name;
  AttentionSpec spec;
  Problem problem;
  Maps query_map = Maps::none, key_map = Maps::none;
  Layout layout = {};
};

AttentionSpec routed(int head_dim, DType dtype, int queries, int keys) {
  AttentionSpec spec;
  spec.head_dim = head_dim, spec.dtype = dtype;
  spec.sparse_q = queries, spec.sparse_kv = keys;
  return spec;
}

/// A call's data and results.
struct Routed {
  const RouteCase& of;
  const Problem& p = of.problem;
  const int64_t d = of.spec.head_dim;
  const int64_t rows = list_blocks(Tokens::queries, of.spec, p);
  const int64_t blocks = list_blocks(Tokens::keys, of.spec, p);
  Floats q, k, query_map, key_map;
  Bytes always;

  explicit Routed(const RouteCase& of) : of(of) {}

  /// Values are those that `of_q` and `of_k` give for (head, token, channel).
  template <typename OfQ, typename OfK> void fill(const OfQ& of_q, const OfK& of_k) {
    const auto filled = [&](int64_t heads, int64_t tokens, const auto& value) {
      Floats x(heads * tokens * d);
      for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i)
        x[i] = reference::round_to(of.spec.dtype, value(i / d / tokens, i / d % tokens, i % d));
      return x;
    };
    q = filled(p.batch * p.heads, p.seq_q, of_q);
    k = filled(p.batch * p.heads_kv, p.seq_kv, of_k);
  }

  /// The mask; the bits of both calls must say the same.
  Bytes listed(int kept) const {
    const Attention attention(of.spec, 0);
    DeviceTensor of_q(of.spec.dtype, p.batch, p.heads, p.seq_q, d, of.layout, kPoison);
    DeviceTensor of_k(of.spec.dtype, p.batch, p.heads_kv, p.seq_kv, d, of.layout, kPoison);
    of_q.upload(q), of_k.upload(k);
    const int64_t lists = p.batch * p.heads * rows, words = list_words(of.spec, p);
    Buffer query_sums(lists * d * 4), key_sums(p.batch * p.heads_kv * blocks * d * 4);
    Buffer mask(lists * blocks), bits(lists * words * 4), bits_alone(lists * words * 4);
    std::list<Buffer> given;
    const auto uploaded = [&](const auto& values) -> const void* {
      if (values.empty())
        return nullptr;
      given.emplace_back(values.size() * sizeof(values[0])).upload(values);
      return given.back().as();
    };
    const auto map = [&](const Floats& values, Maps maps) -> RouterMap {
      return {static_cast<const float*>(uploaded(values)), maps == Maps::per_head};
    };
    BlocksToRoute call{.pooled = {.problem = p,
                                  .q = of_q.view(),
                                  .k = of_k.view(),
                                  .query_sums = query_sums.as<float>(),
                                  .key_sums = key_sums.as<float>()},
                       .query_map = map(query_map, of.query_map),
                       .key_map = map(key_map, of.key_map),
                       .kept = kept,
                       .always = uploaded(always),
                       .mask = mask.as(),
                       .row_bits = bits.as<uint32_t>()};
    driver::synchronize();
    route_blocks(call, attention);
    call.mask = nullptr, call.row_bits = bits_alone.as<uint32_t>();
    route_blocks(call, attention);
    driver::synchronize();
    Faults faults;
    mask.check_guards("mask", faults), bits.check_guards("row_bits", faults);
    query_sums.check_guards("query_sums", faults), key_sums.check_guards("key_sums", faults);
    EXPECT_EQ(faults, Faults());
    const Bytes found = mask.download<uint8_t>();
    std::vector<uint32_t> expected(lists * words);
    for (int64_t i = 0; i < static_cast<int64_t>(found.size()); ++i)
      expected[i / blocks * words + i % blocks / 32] |= uint32_t{found[i]} << i % blocks % 32;
    EXPECT_EQ(bits.download<uint32_t>(), expected);
    EXPECT_EQ(bits_alone.download<uint32_t>(), expected);
    return found;
  }

  /// Means of blocks of (heads, tokens, D), or of magnitudes.
  Doubles means(const Floats& x, int64_t heads, int64_t tokens, int64_t size,
                bool magnitudes = false) const {
    const int64_t count = ceil_div(tokens, size);
    Doubles sums(heads * count * d);
    for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i) {
      const int64_t token = i / d % tokens, block = token / size;
      const double value = magnitudes ? std::abs(double{x[i]}) : double{x[i]};
      sums[(i / d / tokens * count + block) * d + i % d] +=
          value / double(std::min(size, tokens - block * size));
    }
    return sums;
  }
  Doubles means_of(const Floats& x, bool magnitudes) const {
    return &x == &q ? means(q, p.batch * p.heads, p.seq_q, of.spec.sparse_q, magnitudes)
                    : means(k, p.batch * p.heads_kv, p.seq_kv, of.spec.sparse_kv, magnitudes);
  }
  /// Multiplies x by the map, or, transposed, the map by x.
  Doubles mapped(const Doubles& x, const Floats& map, Maps maps, int64_t head, bool magnitudes,
                 bool transposed) const {
    if (maps == Maps::none)
      return x;
    const float* values = &map[maps == Maps::per_head ? head * d * d : 0];
    Doubles result(d);
    for (int64_t i = 0; i < d * d; ++i) {
      const double value = magnitudes ? std::abs(double{values[i]}) : double{values[i]};
      result[transposed ? i % d : i / d] += value * x[transposed ? i / d : i % d];
    }
    return result;
  }
  static double product(const Doubles& x, const Doubles& y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  }
};

/// What FP32 may round, in parts of the magnitudes.
struct Roundings {
  double products, sums_of_keys = 0;
};

/// As many blocks are listed as shall be, and none that is worse than another one by more than
/// that.
void expect_best(const Routed& of, const Bytes& found, int kept, const Roundings& roundings) {
  const Problem& p = of.p;
  const int64_t d = of.d, size = of.of.spec.sparse_kv;
  const Doubles q = of.means_of(of.q, false), k = of.means_of(of.k, false);
  const Doubles large_q = of.means_of(of.q, true), large_k = of.means_of(of.k, true);
  for (int64_t list = 0; list < p.batch * p.heads * of.rows; ++list) {
    const int64_t head = list / of.rows % p.heads;
    const int64_t keys = list / of.rows / p.heads * p.heads_kv + head / (p.heads / p.heads_kv);
    Doubles mean(d);
    for (int64_t i = 0; i < of.blocks * d; ++i)
      mean[i % d] += k[keys * of.blocks * d + i] * double(std::min(size, p.seq_kv - i / d * size)) /
                     double(p.seq_kv);
    const auto row_of = [&](const Doubles& x, int64_t row) {
      return Doubles(x.begin() + row * d, x.begin() + (row + 1) * d);
    };
    // Keys' map is applied to the query, once for all blocks: y (map x) is (y map) x.
    const auto through_maps = [&](Doubles x, bool magnitudes) {
      x = of.mapped(x, of.query_map, of.of.query_map, head, magnitudes, false);
      return of.mapped(x, of.key_map, of.of.key_map, head, magnitudes, true);
    };
    const Doubles y = through_maps(row_of(q, list), false);
    const Doubles large_y = through_maps(row_of(large_q, list), true);
    int listed = 0, forced = 0;
    double worst = std::numeric_limits<double>::infinity(), best_left = -worst;
    for (int64_t block = 0; block < of.blocks; ++block) {
      const bool is_listed = found[list * of.blocks + block] != 0;
      listed += is_listed;
      if (!of.always.empty() && of.always[block] != 0) {
        EXPECT_TRUE(is_listed) << "block " << block << " of list " << list;
        ++forced;
        continue;
      }
      Doubles x = row_of(k, keys * of.blocks + block);
      Doubles large = row_of(large_k, keys * of.blocks + block);
      for (int64_t c = 0; c < d; ++c) {
        x[c] -= mean[c];
        large[c] = roundings.products * std::abs(x[c]) + roundings.sums_of_keys * large[c];
      }
      const double score = Routed::product(y, x), error = Routed::product(large_y, large);
      if (is_listed)
        worst = std::min(worst, score + error);
      else
        best_left = std::max(best_left, score - error);
    }
    EXPECT_EQ(listed, std::max(kept, forced)) << "list " << list;
    EXPECT_GE(worst, best_left) << "list " << list;
  }
}

class RouteBlocks : public OnGpu, public testing::WithParamInterface<RouteCase> {
protected:
  std::mt19937 draw{7};
  float normal() { return std::normal_distribution<float>()(draw); }

  void draw_maps(Routed& of) {
    const auto drawn = [&](Maps maps) {
      Floats values(maps == Maps::none       ? 0
                    : maps == Maps::per_head ? of.p.heads * of.d * of.d
                                             : of.d * of.d);
      for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
        values[i] = normal() / std::sqrt(float(of.d)) + (i / of.d % of.d == i % of.d ? 0.5f : 0);
      return values;
    };
    of.query_map = drawn(of.of.query_map), of.key_map = drawn(of.of.key_map);
  }
};

TEST_P(RouteBlocks, ListsTheBestByFp64) {
  Routed of(GetParam());
  of.fill([&](int64_t, int64_t, int64_t) { return normal(); },
          [&](int64_t, int64_t, int64_t channel) { return normal() + float(channel % 3); });
  draw_maps(of);
  const int many = static_cast<int>(of.blocks);
  for (int kept : {1, std::max(1, many / 4), many})
    expect_best(of, of.listed(kept), kept, {2e-6, 3e-7});
  of.always.resize(many);
  for (int i = 0; i < many; ++i)
    of.always[i] = i == many - 1 || i % 7 == 2 ? 3 : 0;
  for (int kept : {1, std::max(1, many / 3)})
    expect_best(of, of.listed(kept), kept, {2e-6, 3e-7});
}

/// What all keys share is large, and costs no digits; means are exact.
TEST_P(RouteBlocks, TheMeanOfKeysTakesNoDigits) {
  RouteCase of_half = GetParam();
  of_half.spec.dtype = DType::fp16;
  Routed of(of_half);
  const auto drawn = [&](int64_t blocks, unsigned values) {
    Floats numbers(blocks * of.d);
    for (float& number : numbers)
      number = float(draw() % values);
    return numbers;
  };
  const Floats of_queries = drawn(of.p.batch * of.p.heads * of.rows, 255);
  const Floats of_keys = drawn(of.blocks, 2);
  of.fill(
      [&](int64_t head, int64_t token, int64_t channel) {
        const int64_t block = head * of.rows + token / of_half.spec.sparse_q;
        return of_queries[block * of.d + channel] / 64 - 2;
      },
      [&](int64_t, int64_t token, int64_t channel) {
        return 60000.0f + 32 * of_keys[token / of_half.spec.sparse_kv * of.d + channel];
      });
  draw_maps(of);
  const int kept = std::max(1, static_cast<int>(of.blocks) / 3);
  expect_best(of, of.listed(kept), kept, {.products = 5e-7});
}

std::vector<RouteCase> route_cases() {
  using enum DType;
  using enum Maps;
  return {
      {"D64_bf16_128x64", routed(64, bf16, 128, 64), {2, 4, 2, 300, 200}, none, none, {true, 8}},
      {"D128_bf16_Maps", routed(128, bf16, 128, 64), {1, 2, 1, 2300, 2010}, shared, shared},
      {"D72_fp16_HeadMaps",
       routed(72, fp16, 64, 64),
       {2, 3, 1, 129, 5000},
       per_head,
       per_head,
       {false, 16}},
      {"D256_fp16_QueryMap", routed(256, fp16, 64, 128), {1, 2, 2, 100, 900}, shared, none},
      {"D40_bf16_KeyMaps", routed(40, bf16, 64, 64), {1, 2, 1, 1100, 700}, none, per_head},
      {"D64_bf16_MixedMaps", routed(64, bf16, 128, 128), {2, 2, 1, 500, 1100}, per_head, shared},
      {"D32_fp16_Short", routed(32, fp16, 128, 64), {1, 1, 1, 1, 64}, shared, none},
      {"D32_bf16_Half", routed(32, bf16, 64, 64), {1, 2, 1, 64 * 17, 64 * 1024}, none, shared},
      {"D32_bf16_Long",
       routed(32, bf16, 64, 64),
       {1, 1, 1, 64 * 10 - 3, 64 * 1100 - 13},
       shared,
       none},
      {"D32_bf16_Longest", routed(32, bf16, 64, 64), {1, 1, 1, 64 * 3, 64 * 2048}},
  };
}
INSTANTIATE_TEST_SUITE_P(Gpu, RouteBlocks, testing::ValuesIn(route_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

/// Whole numbers, whose scores FP32 does not round.
class RouteOf : public OnGpu {
protected:
  const RouteCase of{"", routed(64, DType::bf16, 64, 64), {1, 2, 1, 64 * 5, 64 * 64}};
  static float sign(int64_t bit) { return bit % 2 != 0 ? 1.0f : -1.0f; }
};

TEST_F(RouteOf, EqualScoresTheFirst) {
  Routed routed(of);
  // Of 64 blocks each value comes often; a query is a power of two in a channel of its own.
  const auto of_key = [](int64_t block, int64_t channel) {
    return channel < 5 ? float(block * 5 % (3 + channel)) : 0.0f;
  };
  routed.fill(
      [&](int64_t head, int64_t token, int64_t channel) {
        return channel == token / 64 ? (head == 0 ? 2.0f : -0.5f) : 0.0f;
      },
      [&](int64_t, int64_t token, int64_t channel) { return of_key(token / 64, channel); });
  for (int kept : {1, 7, 32, 63}) {
    const Bytes found = routed.listed(kept);
    for (int64_t list = 0; list < 10; ++list) {
      std::vector<int> order(64);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        const float x = of_key(a, list % 5), y = of_key(b, list % 5);
        return list < 5 ? x > y : x < y;
      });
      Bytes expected(64);
      for (int i = 0; i < kept; ++i)
        expected[order[i]] = 1;
      EXPECT_EQ(Bytes(found.begin() + list * 64, found.begin() + (list + 1) * 64), expected)
          << "list " << list << ", kept " << kept;
    }
  }
}

/// Infinite queries make scores of either sign, and of -inf none is listed; NaN is the highest.
TEST_F(RouteOf, NanAndInfinities) {
  Routed routed(of);
  const float infinite = std::numeric_limits<float>::infinity();
  routed.fill(
      [&](int64_t head, int64_t token, int64_t channel) {
        const float value = token / 64 == 1 ? infinite : token / 64 == 2 ? std::nanf("") : 1.0f;
        return channel == 0 ? value * (head == 0 ? 1 : -1) : channel == 1 ? 1.0f : 0.0f;
      },
      [&](int64_t, int64_t token, int64_t channel) {
        // Block 33 is none of those whose mean is subtracted.
        return token / 64 == 33 && channel == 5 ? std::nanf("") : sign(token / 64 / 3);
      });
  routed.always.resize(64);
  routed.always[0] = 1; // its score is -inf in one of the heads
  const Bytes found = routed.listed(40);
  for (int64_t list = 0; list < 10; ++list) {
    const int64_t row = list % 5;
    int listed = 1;
    for (int64_t block : {33, 0}) // NaN, which counts as the highest, and `always`
      EXPECT_EQ(found[list * 64 + block], 1) << "list " << list;
    for (int64_t block = 1; block < 64; ++block) {
      listed += found[list * 64 + block];
      const bool is_high = sign(block / 3) == (list < 5 ? 1 : -1);
      if (row == 1) {
        EXPECT_EQ(found[list * 64 + block], is_high || block == 33) << "block " << block;
      } else if (row == 2) {
        EXPECT_EQ(found[list * 64 + block], block < 40) << "block " << block;
      }
    }
    EXPECT_TRUE(row == 1 || listed == 40) << "list " << list << " has " << listed;
  }
}

TEST_F(RouteOf, WrongCallsAreRefused) {
  const Attention attention(of.spec, 0);
  const auto at = [](uint64_t place) { return reinterpret_cast<float*>(place); };
  const BlocksToRoute sound{.pooled = {.problem = {1, 2, 1, 256, 128},
                                       .q = {at(0x100000), 256 * 64 * 2, 256 * 64, 64},
                                       .k = {at(0x200000), 128 * 64, 128 * 64, 64},
                                       .query_sums = at(0x300000),
                                       .key_sums = at(0x400000)},
                            .query_map = {at(0x500000), true},
                            .key_map = {at(0x600000), false},
                            .kept = 1,
                            .mask = at(0x700000),
                            .row_bits = reinterpret_cast<uint32_t*>(0x800000)};
  const auto refused = [&](const std::string& why, const auto& change) {
    BlocksToRoute changed = sound;
    change(changed);
    try {
      route_blocks(changed, attention);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  using Call = BlocksToRoute;
  refused("kept = 0", [](Call& a) { a.kept = 0; });
  refused("both null", [](Call& a) { a.mask = a.row_bits = nullptr; });
  refused("row_bits: the address",
          [](Call& a) { a.row_bits = reinterpret_cast<uint32_t*>(0x800002); });
  refused("query_map: the address is not", [&](Call& a) { a.query_map.values = at(0x500008); });
  refused("key_map: the address is not", [&](Call& a) { a.key_map.values = at(0x600004); });
  refused("key_sums: the address is not", [&](Call& a) { a.pooled.key_sums = at(0x400008); });
  refused("q: the address is null", [](Call& a) { a.pooled.q.data = nullptr; });
  refused("mask", [&](Call& a) { a.mask = at(0x507ff0); });
  refused("row_bits", [](Call& a) { a.row_bits = reinterpret_cast<uint32_t*>(0x300010); });
  refused("2048 at most", [](Call& a) { a.pooled.problem.seq_kv = 64 * 2048 + 1; });
}

} // namespace
