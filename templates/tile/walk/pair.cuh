//===- tile/walk/pair.cuh - Two warpgroups that own the same 64 rows --------------===//
//
// The sums of all channels of a wide head are more than a warpgroup's registers. In a pair each
// forms the scores of other tokens, hands them over as fragments of A, and sums half of the
// channels over the tokens of both: nothing is formed twice.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/warp_roles.cuh"
#include "tile/memory/kept_fragments.cuh"
#include "tile/walk/place.cuh"

static_assert(IN_PAIRS);
constexpr int PAIR_WARPS = 8;
