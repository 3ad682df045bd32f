//===- products.h - A warp's matrix products --------------------------------===//
#pragma once

#include "tests/simulator/lane.h"

#include <string>

namespace simulator {

/// Multiplies what the 32 lanes of a warp hold.
void multiply(const WarpProduct* const* lanes);
/// Multiplies what the 32 lanes of warp `warp` of its group hold.
void multiply(const GroupProduct* lanes, int warp, const char* shared, unsigned shared_bytes);

} // namespace simulator
