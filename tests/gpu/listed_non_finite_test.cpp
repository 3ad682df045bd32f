//===- listed_non_finite_test.cpp - NaN and Inf where queries have lists ----===//
//
// They show wherever FP64 shows them. Results that no list connects with them keep their bits,
// except through two things that tokens share: scales of channels, which hold for a unit of tokens,
// and the mean of the keys.
//
//===----------------------------------------------------------------------===//
#include "tests/gpu/listed.h"

#include <algorithm>
#include <cmath>
#include <limits>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

using reference::Inputs;

constexpr Problem kProblem{1, 4, 2, 400, 900};
constexpr int64_t kHead = 1, kKeyHead = 0; ///< of the value; queries 0 and 1 share the keys

class ListedNonFinite : public CaseTest {
protected:
  const AttentionSpec& spec() const { return attention->spec(); }
  int64_t lists() const { return lists_of(spec(), kProblem); }
  int64_t blocks() const { return blocks_of(spec(), kProblem); }

  /// Two blocks a list, other ones for each list, the last three of none; few are enough to leave
  /// most of the keys of every list to others.
  Inputs inputs() const {
    Inputs in = listed_inputs(spec(), kProblem, 0);
    for (int64_t list = 0; list < kProblem.heads * lists(); ++list)
      for (const int64_t block : {list * 5, list * 3 + 1})
        in.listed[list * blocks() + block % (blocks() - 3)] = 1;
    return in;
  }
  bool listed(const Inputs& in, int64_t head, int64_t list, int64_t block) const {
    return in.listed[(head * lists() + list) * blocks() + block] != 0;
  }

  /// Holds what a value may change of the key head that it belongs to or sees.
  struct Reach {
    std::vector<char> lists, blocks; ///< of both query heads, and of the keys
    bool everything = false;
  };
  static bool meet(int64_t block, int64_t block_tokens, int64_t unit, int64_t unit_tokens) {
    return block * block_tokens < (unit + 1) * unit_tokens &&
           (block + 1) * block_tokens > unit * unit_tokens;
  }
  /// A key or a value reaches lists that name a block of its unit, and every block that these name.
  Reach of_key(const Inputs& in, int64_t key, bool everything) const {
    Reach reach{std::vector<char>(2 * lists()), std::vector<char>(blocks()), everything};
    const int unit = channel_tokens_kv(spec());
    for (int64_t list = 0; list < 2 * lists(); ++list) {
      for (int64_t block = 0; block < blocks(); ++block)
        reach.lists[list] |=
            listed(in, 0, list, block) && meet(block, spec().sparse_kv, key / unit, unit);
      for (int64_t block = 0; block < blocks(); ++block)
        reach.blocks[block] |= reach.lists[list] && listed(in, 0, list, block);
    }
    return reach;
  }
  /// A query or its dO reaches its list, and what lists of its unit name.
  Reach of_query(const Inputs& in, int64_t query) const {
    Reach reach{std::vector<char>(2 * lists()), std::vector<char>(blocks())};
    const int unit = channel_tokens_q(spec());
    reach.lists[kHead * lists() + query / spec().sparse_q] = 1;
    for (int64_t list = 0; list < lists(); ++list)
      for (int64_t block = 0; block < blocks(); ++block)
        reach.blocks[block] |=
            listed(in, kHead, list, block) && meet(list, spec().sparse_q, query / unit, unit);
    return reach;
  }

  /// `reached(head, token)`: whether the value may change that row.
  template <typename Reached>
  void expect_seen(const char* name, const std::vector<float>& got, const std::vector<float>& clean,
                   const std::vector<double>& exact, int64_t heads, const Reached& reached) const {
    SCOPED_TRACE(name);
    const int64_t tokens = heads == kProblem.heads ? kProblem.seq_q : kProblem.seq_kv;
    const int64_t width = static_cast<int64_t>(got.size()) / (heads * tokens);
    size_t hidden = 0, leaked = 0, kept = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / width;
      hidden += std::isfinite(clean[i]) && !std::isfinite(exact[i]) && std::isfinite(got[i]);
      if (row * kProblem.heads_kv / (heads * tokens) == kKeyHead &&
          reached(row / tokens, row % tokens))
        continue;
      ++kept;
      leaked += got[i] != clean[i];
    }
    EXPECT_EQ(hidden, 0u) << "elements are finite where FP64's are not";
    EXPECT_EQ(leaked, 0u) << "elements changed that no list connects with the value";
    EXPECT_GE(kept, got.size() / 2);
  }
  void expect_seen(const Inputs& in, const reference::Outputs<float>& clean, const Reach& reach) {
    const auto got = run(*attention, in);
    const auto exact = reference::exact(in, spec());
    const auto query = [&](int64_t head, int64_t token) {
      return reach.everything || reach.lists[head * lists() + token / spec().sparse_q] != 0;
    };
    const auto key = [&](int64_t, int64_t token) {
      return reach.everything || reach.blocks[token / spec().sparse_kv] != 0;
    };
    expect_seen("out", got.o, clean.o, exact.o, kProblem.heads, query);
    expect_seen("lse", got.lse, clean.lse, exact.lse, kProblem.heads, query);
    expect_seen("dq", got.dq, clean.dq, exact.dq, kProblem.heads, query);
    expect_seen("dk", got.dk, clean.dk, exact.dk, kProblem.heads_kv, key);
    expect_seen("dv", got.dv, clean.dv, exact.dv, kProblem.heads_kv, key);
  }
};

TEST_P(ListedNonFinite, SeenWhereListsShowThemAndNowhereElse) {
  const Inputs clean_in = inputs();
  const auto clean = run(*attention, clean_in);
  const int64_t d = spec().head_dim, query = 200;
  const int64_t named = spec().sparse_kv + 3, nobodys = kProblem.seq_kv - 2 * spec().sparse_kv;
  // The scale that brings V into FP16's range belongs to all keys of a head, as their mean does.
  const bool v_everywhere = spec().dp_sums == DpSums::fp16;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // Products with elements of both signs make both infinities of one.
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
    for (const auto tensor : {&Inputs::q, &Inputs::dout}) {
      Inputs in = clean_in;
      SCOPED_TRACE(std::string(tensor == &Inputs::q ? "q" : "dout") + ": " + std::to_string(value));
      (in.*tensor)[(kHead * kProblem.seq_q + query) * d + 33] = value;
      expect_seen(in, clean, of_query(clean_in, query));
    }
    for (const int64_t key : {named, nobodys})
      for (const auto tensor : {&Inputs::k, &Inputs::v}) {
        // A key that is named and a value that nobody names are NaN, and the others infinite.
        if (((key == named) == (tensor == &Inputs::k)) != std::isnan(value))
          continue;
        Inputs in = clean_in;
        SCOPED_TRACE((tensor == &Inputs::k ? "k of key " : "v of key ") + std::to_string(key) +
                     ": " + std::to_string(value));
        (in.*tensor)[key * d + 33] = value;
        const bool everywhere = tensor == &Inputs::k ? spec().smooth_k : v_everywhere;
        expect_seen(in, clean, of_key(clean_in, key, everywhere));
      }
  }
}

std::vector<Case> smoothed_and_unsmoothed() {
  std::vector<Case> all = sparse_cases();
  Case unsmoothed = sparse_cases({"D64_bf16_128x64"}).at(0);
  unsmoothed.name += "_Unsmoothed", unsmoothed.spec.smooth_k = false;
  all.push_back(unsmoothed);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Gpu, ListedNonFinite, testing::ValuesIn(smoothed_and_unsmoothed()),
                         case_name);

} // namespace
