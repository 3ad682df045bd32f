//===- tile/prepass/channel_scale.cuh - Scales of channels of transposed copies -----===//
//
// Sums of products pass from one scale block to the next, and their columns are rescaled from one
// scale to another (Sums::rescale_columns). That must neither overflow nor lose them beside what
// integer products are too large by. So a channel's scales in a head are never farther from each
// other than 2^60 or so: what is smaller beside the head counts as zeros, and zeros have the least
// scale.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "tile/prepass/token_share.cuh"

constexpr float LEAST_BESIDE = 8.67361737988403547e-19f; // 2^-60

/// As the copies' readers have it (base.cuh). With a NaN or Inf in the scale block both are NaN,
/// and `levels` is none.
struct ChannelScale {
  float value, inverse;
  float levels; ///< what the scale block's values are multiplied by
};
/// `magnitude` is the head's, 1 where the scale block's maxima are all at least LEAST_BESIDE, which
/// is never small. Under `block` there is one scale for all channels, which the factor of a row
/// takes in: sums are never in units of it.
__device__ __forceinline__ ChannelScale channel_scale(float maximum, float magnitude) {
  const float least = BLOCK_SCALES ? TINY : max_number(TINY, magnitude * LEAST_BESIDE);
  if (maximum < least && (BLOCK_SCALES || maximum < LEAST_BESIDE))
    return {least, __fdiv_rn(1.0f, least), 0.0f};
  const Scale scale = exact_scale(maximum);
  return {scale.value, maximum < INFINITY_F ? scale.inverse : scale.value, scale.inverse};
}

/// These tokens of a head tell its magnitude: they are evenly spaced, the first among them.
constexpr int SAMPLED_TOKENS = 256;
__device__ __forceinline__ int sample_step(int tokens) {
  return maximum(1, ceil_div(tokens, SAMPLED_TOKENS));
}
__device__ __forceinline__ Source sample_of(const Element* head, s64 stride, int tokens,
                                            int channels) {
  const int step = sample_step(tokens);
  return {head, stride * step, 0, ceil_div(tokens, step), channels};
}
/// This one is for where the magnitude is known.
__device__ __forceinline__ Source no_sample() { return {nullptr, 0, 0, 0, 0}; }
