//===- tile/family.cuh - The matrix products of the tile's family -----------===//
//
// The emitter includes products_wgmma.cuh in the place of this file where the tile says so.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/products_mma.cuh"
