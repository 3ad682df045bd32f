//===- random_numbers.h - Drawn numbers, the same on every machine ----------===//
#pragma once

#include <cstdint>
#include <initializer_list>

namespace sagebwd::tools {

/// SplitMix64: small, and the same on every machine.
class Random {
public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  /// A number from low to high, both included.
  int64_t between(int64_t low, int64_t high) { return low + next() % (high - low + 1); }
  bool one_in(int64_t n) { return between(1, n) == 1; }
  template <typename T> T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, choices.size() - 1)];
  }

private:
  uint64_t state_;
};

} // namespace sagebwd::tools
