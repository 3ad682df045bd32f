//===- fastest.cpp - The fastest precision on a GPU -------------------------===//

#include "generator/fastest.h"
#include "generator/operation.h"

namespace sagebwd {
namespace {

struct KnownGpu {
  int major, minor;      ///< compute capability
  std::string_view name; ///< a part of the GPU's name
  FastestPrecision fastest;
};

constexpr Precision kDefault = Precision::six_of_seven;

/// The first that fits a GPU counts. GPUs that are not here have the default: an H20, say, has far
/// slower tensor cores than an H100 and is otherwise alike.
///
/// On an H200 gradients16 is faster than six-of-seven at 64 and 128 channels, and at 256 up to 4096
/// tokens (bench/results/speed-grid.json); at more it takes up to 5 % longer. The rest is predicted
/// for 8192 tokens (balance.json there). FP16 sums of dP make an RTX 4090 8 to 10 % faster, an L40S
/// up to 8 % slower and an A100 2 % slower or faster, by the mask and the channels. Cards of the
/// same kind have the same rates relative to each other (bench/gpus.py). For a B200 there is a
/// limit from instruction counts (instructions.json).
constexpr FastestPrecision kHopper = {Precision::gradients16, DpSums::fp32,
                                      "measured on H100 and H200"};
constexpr FastestPrecision kGeForce = {kDefault, DpSums::fp16, "predicted for an RTX 4090"};
constexpr FastestPrecision kProfessional = {kDefault, DpSums::fp32, "predicted for an L40S"};
constexpr KnownGpu kKnownGpus[] = {
    {9, 0, "H100", kHopper},
    {9, 0, "H200", kHopper},
    {8, 6, "GeForce", kGeForce},
    {8, 9, "GeForce", kGeForce},
    {12, 0, "GeForce", kGeForce},
    {8, 6, "", kProfessional},
    {8, 9, "", kProfessional},
    {12, 0, "", kProfessional},
    {8, 0, "", {kDefault, DpSums::fp32, "predicted for an A100"}},
    {10, 0, "", {kDefault, DpSums::fp32, "predicted for a B200"}},
};

bool exists(AttentionSpec spec, const Arch& arch, const FastestPrecision& words) {
  spec.precision = words.precision, spec.dp_sums = words.dp_sums;
  try {
    const Operation operation(resolved(spec), arch);
    operation.kernels(Pass::forward), operation.kernels(Pass::backward);
    return true;
  } catch (const SpecError&) {
    return false;
  }
}

} // namespace

const FastestPrecision& fastest_precision(const Arch& arch, std::string_view gpu) {
  for (const KnownGpu& known : kKnownGpus)
    if (arch.major == known.major && arch.minor == known.minor &&
        gpu.find(known.name) != std::string_view::npos)
      return known.fastest;
  static constexpr FastestPrecision unknown;
  return unknown;
}

FastestPrecision fastest_precision(const AttentionSpec& spec, const Arch& arch,
                                   std::string_view gpu, bool keeps_dp_sums) {
  FastestPrecision first = fastest_precision(arch, gpu);
  // Nobody has predicted FP16 sums above 128 channels, nor measured smoothed queries on Hopper,
  // where only mma.sync kernels have them.
  if (widest(spec))
    first.dp_sums = DpSums::fp32;
  if (spec.smooth_q && arch.has_wgmma())
    first.precision = kDefault;
  if (keeps_dp_sums)
    first.dp_sums = spec.dp_sums;
  FastestPrecision second = first, last = first;
  last.precision = kDefault;
  if (!keeps_dp_sums)
    second.dp_sums = last.dp_sums = DpSums::fp32;
  for (const FastestPrecision& words : {first, second, last})
    if (exists(spec, arch, words))
      return words;
  return first; // whose errors name what the caller has given
}

} // namespace sagebwd
