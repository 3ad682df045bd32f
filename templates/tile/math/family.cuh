//===- tile/math/family.cuh - The matrix products of the tile's family -----------===//
//
// The emitter includes products_wgmma.cuh in the place of this file where the tile says so.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/products_mma.cuh"
