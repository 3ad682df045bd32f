//===- random_expressions.cpp - Masks and score functions of a verification ===//

#include "tools/random_expressions.h"

#include "generator/pointwise.h"

#include <algorithm>
#include <array>
#include <bit>

namespace sagebwd::tools {
namespace {

constexpr std::array kMasks = {
    "q>=k&q-k<40",
    "doc[b,q]==doc[b,k]",
    "q>=k|k<prefix[b,h]",
    "(q//32+k//32)%2==0|q==k",
};
constexpr std::array kScores = {
    "5.0*tanh(s/5.0)",
    "s-slope[h]*abs(q-k)",
    "s+bias[h,k-q+100]",
    "s*(1.0+slope[h])",
    "where(q>k,s,0.5*tanh(s)+slope[h])",
};

/// An int for masks, as documents have them, and a float around zero for scores.
int32_t number_of(Random& random, bool of_score) {
  if (!of_score)
    return static_cast<int32_t>(random.between(0, 3));
  return std::bit_cast<int32_t>(static_cast<float>(random.between(-1000, 1000)) / 4000);
}

} // namespace

AttentionSpec with_expression(Random& random, AttentionSpec spec) {
  if (random.one_in(2))
    spec.mask = kMasks[random.between(0, kMasks.size() - 1)];
  else
    spec.score = kScores[random.between(0, kScores.size() - 1)];
  return spec;
}

namespace {

std::vector<reference::TableOfNumbers> random_tables(const AttentionSpec& spec, Random& random) {
  std::vector<reference::TableOfNumbers> tables;
  for (const TableOfSpec& named : tables_of(spec)) {
    // Some indices are beyond the ends, where the last element counts.
    const int64_t rows = named.indices == 2 ? random.between(1, 4) : 1;
    reference::TableOfNumbers table{rows, random.between(1, 300), {}};
    for (int64_t i = 0; i < rows * table.columns; ++i)
      table.numbers.push_back(number_of(random, named.of_score));
    tables.push_back(std::move(table));
  }
  return tables;
}

} // namespace

void add_random_expressions(const AttentionSpec& spec, uint64_t seed, reference::Inputs& in) {
  constexpr int kDraws = 8; // of tables, until they leave somebody something to see
  Random random(seed);
  for (int i = 0; i == 0 || (i < kDraws && !spec.mask.empty() && !std::ranges::count(in.seen, 1));
       ++i) {
    in.tables = random_tables(spec, random);
    if (!spec.mask.empty())
      in.seen = reference::seen_by_mask(spec, in.problem, in.tables);
  }
  if (has_score(spec))
    in.score = reference::score_by_spec(spec, in.tables);
}

} // namespace sagebwd::tools
