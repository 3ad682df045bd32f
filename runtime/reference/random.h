//===- random.h - Normal numbers by seed and index ------------------------===//
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::reference {

/// `count` numbers with the distribution N(0, sigma^2). A seed has 2^32 independent streams.
std::vector<float> normal(int64_t count, double sigma, uint64_t seed, uint32_t stream);

} // namespace sagebwd::reference
