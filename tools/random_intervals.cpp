//===- random_intervals.cpp - Intervals of hidden queries, drawn ------------===//
#include "tools/random_intervals.h"

#include <random>

namespace sagebwd::tools {

namespace {

/// The numbers of a key.
class Numbers {
public:
  Numbers(const AttentionSpec& spec, int64_t queries, uint64_t seed)
      : spec_(spec), queries_(static_cast<int32_t>(queries)), random_(seed) {}

  /// From low to high, both included; the standard's distributions differ between libraries.
  int32_t between(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int n) { return between(1, n) == 1; }

  std::vector<int32_t> draw() {
    const int32_t begin = any(), length = between(0, queries_ / 2);
    if (spec_.intervals == 4)
      return one_in(4) ? hiding(0, 0)
                       : std::vector{begin, begin + length, any(), between(0, queries_ / 2)};
    if (spec_.intervals == 2 && spec_.causal == Causal::none) // both ends of all queries
      return {queries_ - between(0, queries_ * 3 / 4), between(-1, queries_ / 2)};
    return one_in(4) ? hiding(queries_, queries_) : hiding(begin, begin + length);
  }
  /// These queries, and without a second number those behind them, or without a causal mask and a
  /// fourth number those before them.
  std::vector<int32_t> hiding(int32_t begin, int32_t end) const {
    if (spec_.intervals == 4)
      return {begin, end, 0, 0};
    if (spec_.intervals == 1)
      return {begin};
    return spec_.causal == Causal::none ? std::vector{queries_, end} : std::vector{begin, end};
  }

private:
  int32_t any() { return between(-20, queries_ + 20); }

  AttentionSpec spec_;
  int32_t queries_;
  std::mt19937_64 random_;
};

} // namespace

void add_random_intervals(const AttentionSpec& spec, uint64_t seed, reference::Inputs& in) {
  const Problem& p = in.problem;
  Numbers numbers(spec, p.seq_q, seed);
  in.sequences_share_intervals = numbers.one_in(3);
  in.heads_share_intervals = numbers.one_in(2);
  const int64_t heads =
      (in.sequences_share_intervals ? 1 : p.batch) * (in.heads_share_intervals ? 1 : p.heads_kv);
  constexpr int32_t kRuns[] = {1, 64, 128, 300};
  const int32_t run = kRuns[numbers.between(0, 3)];
  const auto last = static_cast<int32_t>(p.seq_q - 1);
  const bool some_are_blind = numbers.one_in(4);
  const int32_t blind = numbers.between(0, last), end = numbers.between(blind, last) + 1;
  std::vector<int32_t> of_key;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t key = 0; key < p.seq_kv; ++key) {
      if (some_are_blind)
        of_key = numbers.hiding(blind, end);
      else if (key % run == 0)
        of_key = numbers.draw();
      in.intervals.insert(in.intervals.end(), of_key.begin(), of_key.end());
    }
}

} // namespace sagebwd::tools
