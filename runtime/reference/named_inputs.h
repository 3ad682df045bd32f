//===- named_inputs.h - Random inputs of named distributions --------------===//
//
// The error of quantisation depends on the inputs. Besides Gaussian inputs, these distributions
// imitate trained models: channels and tokens far larger than the others, a first key that gets
// half of the mass, attention to near tokens, normalised queries and keys, gradients whose size
// varies over the rows, padding, offsets that all channels have in common. A name determines the
// distribution; sizes and mask are separate arguments.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/reference/reference.h"

#include <string_view>

namespace sagebwd::reference {

enum class Distribution {
  gaussian,
  outlier_channels,
  heavy_channels,
  sink,
  sink_last,
  large_first_key,
  local,
  qk_norm,
  qk_norm_unit,
  massive_tokens,
  padded,
  alternating_keys,
  common_offset,
  tiny_values,
};

/// Facts about a distribution that front ends show.
struct DistributionFacts {
  std::string_view text; ///< one line: what the distribution is, and what it imitates
  int least_channels;    ///< the least number of channels
  Causal mask;           ///< the mask of the distribution in the project's error tables
};
const DistributionFacts& facts_of(Distribution);

/// A distribution and its parameters. Only `gaussian` has parameters.
struct InputKind {
  Distribution distribution = Distribution::gaussian;
  double sigma = 1;      ///< standard deviation of q and k
  double key_offset = 0; ///< added to every key, with alternating sign over the channels
};

/// Inputs rounded to `dtype`. Equal arguments give equal numbers on every machine (Philox and
/// Box-Muller in FP64). Raises SpecError if the distribution does not have a parameter, or if there
/// are too few channels.
Inputs named_inputs(const InputKind&, const Problem&, int head_dim, DType, uint64_t seed);

} // namespace sagebwd::reference

namespace sagebwd {

template <> struct Words<reference::Distribution> {
  static constexpr std::string_view what = "inputs";
  static constexpr Word<reference::Distribution> all[] = {
      {reference::Distribution::gaussian, "gaussian"},
      {reference::Distribution::outlier_channels, "outlier-channels"},
      {reference::Distribution::heavy_channels, "heavy-channels"},
      {reference::Distribution::sink, "sink"},
      {reference::Distribution::sink_last, "sink-last"},
      {reference::Distribution::large_first_key, "large-first-key"},
      {reference::Distribution::local, "local"},
      {reference::Distribution::qk_norm, "qk-norm"},
      {reference::Distribution::qk_norm_unit, "qk-norm-unit"},
      {reference::Distribution::massive_tokens, "massive-tokens"},
      {reference::Distribution::padded, "padded"},
      {reference::Distribution::alternating_keys, "alternating-keys"},
      {reference::Distribution::common_offset, "common-offset"},
      {reference::Distribution::tiny_values, "tiny-values"}};
};

} // namespace sagebwd
