//===- tile/walk/visible.cuh - Which keys a query sees ---------------------------===//
//
// A query sees the keys that the mask leaves. Kernels for lists of blocks have lists.cuh in the
// place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/walk/mask.cuh"

/// The sum of a query's P. Only with lists it may be unknown what the query sees.
__device__ __forceinline__ float known_sum(float sum, const Sequence&, int) { return sum; }
