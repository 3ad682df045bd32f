//===- tile/math/given_score.cuh - A function changes scores ----------------------===//
//
// Kernels with a score function have this file in the place of plain_score.cuh. Score takes scores
// in units of log2, times GIVEN, and exponent() gives such; slope() is the function's in natural
// units. With BENDS_SCORES it is not s plus something: then it needs what K-smoothing subtracts
// from scores, which ROW_SHIFT has in the forward and ROW_SINK in the backward; and dS is
// multiplied by its slope.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "score_expression.cuh"

constexpr bool HAS_SCORE = true;
