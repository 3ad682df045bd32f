//===- tile/fused_layout.cuh - The LAYOUT of kernels/backward_fused.cuh ----===//
#pragma once

#include "layouts/backward_fused.cuh"
#include "tile/block_shape.cuh"

constexpr BackwardFusedLayout LAYOUT(SHAPE);
