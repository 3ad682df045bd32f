//===- products.h - A warp's matrix products --------------------------------===//
#pragma once

#include "tests/simulator/lane.h"

#include <string>

namespace simulator {

/// Of 32 lanes.
void multiply(const WarpProduct* const* lanes);
/// Of 32 lanes of warp `warp` of its group.
void multiply(const GroupProduct* lanes, int warp, const char* shared, unsigned shared_bytes);

} // namespace simulator
