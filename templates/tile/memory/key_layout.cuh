//===- tile/memory/key_layout.cuh - The LAYOUT of a mma kernel whose blocks own keys --===//
#pragma once

#include "layouts/backward_dkv.cuh"
#include "layouts/backward_fused.cuh"
#include "tile/math/dp_sums.cuh"
#include "tile/memory/block_shape.cuh"

template <bool FUSED_IN_INT8> struct KeyLayout : BackwardDkvLayout {
  constexpr KeyLayout() : BackwardDkvLayout(SHAPE, WITH_DQ, DP16) {}
};
template <> struct KeyLayout<true> : BackwardFusedLayout {
  constexpr KeyLayout() : BackwardFusedLayout(SHAPE) {}
};
constexpr KeyLayout<WITH_DQ && !DQ16> LAYOUT;
