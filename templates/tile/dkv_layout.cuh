//===- tile/dkv_layout.cuh - The LAYOUT of kernels/backward_dkv.cuh --------===//
#pragma once

#include "layouts/backward_dkv.cuh"
#include "tile/block_shape.cuh"
#include "tile/dp_sums.cuh"

constexpr BackwardDkvLayout LAYOUT(SHAPE, WITH_DQ, DP16);
