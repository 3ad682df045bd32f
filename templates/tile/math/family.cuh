//===- tile/math/family.cuh - The matrix products of the tile's family -----------===//
//
// Kernels whose tile multiplies with wgmma have products_wgmma.cuh in the place of this file.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/math/products_mma.cuh"
