//===- random.cpp - Random numbers that are the same on every machine -----===//
//
// The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011). The counter is the element's index, so a number does not depend on the order of
// generation.
//
//===----------------------------------------------------------------------===//
#include "runtime/reference/random.h"

#include "runtime/parallel_for.h"

#include <array>
#include <cmath>
#include <numbers>

namespace sagebwd::reference {
namespace {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t seed) {
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53) * counter[0];
    const uint64_t b = uint64_t(0xCD9E8D57) * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

/// A number in (0, 1) with 52 random bits.
double uniform(uint32_t high, uint32_t low) {
  return (static_cast<double>((uint64_t(high) << 32 | low) >> 12) + 0.5) * 0x1p-52;
}

} // namespace

/// Each pair of numbers comes from one counter.
std::vector<float> normal(int64_t count, double sigma, uint64_t seed, uint32_t stream) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; i += 2) {
    if (i % (1 << 20) == 0)
      check_interrupt();
    const auto bits =
        philox({static_cast<uint32_t>(i / 2), static_cast<uint32_t>(i / 2 >> 32), stream, 0}, seed);
    const double radius = sigma * std::sqrt(-2 * std::log(uniform(bits[0], bits[1])));
    const double angle = 2 * std::numbers::pi * uniform(bits[2], bits[3]);
    values[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < count)
      values[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return values;
}

} // namespace sagebwd::reference
