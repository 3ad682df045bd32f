//===- tile/math/operand.cuh - P and dS of a tile as operands of dV's and dK's products --===//
#pragma once

#include "tile/math/quantizer.cuh"
#include "tile/math/transposed_scores.cuh"

/// Operand A, in 8 bits or in 16.
struct Operand {
  u32 x8[TILE_Q / 32][4], x16[TILE_Q / 16][4];
};
/// The scales of its rows g and g + 8 in 8 bits.
struct RowScales {
  Scale low, high;
};
/// Quantises rows by their largest magnitudes.
template <bool SIGNED>
__device__ __forceinline__ RowScales quantize(Operand& operand, const float (&x)[COLUMNS8][4],
                                              const float (&largest)[2]) {
  constexpr int LEVELS = SIGNED ? SIGNED_LEVELS : UNSIGNED_LEVELS;
  const RowScales scales = {fast_scale<LEVELS>(largest[0]), fast_scale<LEVELS>(largest[1])};
  quantize_fragments<SIGNED, TILE_Q / 32>(operand.x8, x, scales.low.inverse, scales.high.inverse);
  return scales;
}
