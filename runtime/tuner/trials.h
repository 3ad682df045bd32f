//===- trials.h - Compare candidate tiles in worker processes -------------===//
#pragma once

#include "cache/record.h"
#include "runtime/tuner/worker/bench.h"

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sagebwd {

/// Tuning failed as a whole. A candidate that drops out is not an error.
class TuneError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

namespace tuner {

/// A tile that compiled, and its result. `tried.outcome` stays empty until the tile drops out or is
/// timed.
struct Candidate {
  BenchKernel kernel;
  TriedTile tried;
};

struct TrialLimits {
  /// For a worker's start, its buffers and the default tile's outputs.
  std::chrono::milliseconds open{60000};
  /// For vetting one candidate, or ten times the duration of the default tile if that is longer.
  std::chrono::milliseconds vet{5000};
  /// For one timed launch, in addition to 20 times the duration of a vetting launch.
  std::chrono::milliseconds launch{5000};
  /// For all rounds together. The number of rounds follows from this limit.
  std::chrono::milliseconds timing{15000};
  /// The maximum; the minimum is kFewestRounds.
  int rounds = 15;
};
inline constexpr int kFewestRounds = 5;

/// Called with "vetting" or "timing", the tile that is done, and the numbers of finished and of all
/// steps.
using TrialProgress =
    std::function<void(const std::string& stage, const std::string& tile, int done, int total)>;

/// Vets and times candidates in worker processes. The first candidate is the default tile.
/// Candidates whose outcome is empty take part. If a candidate crashes, hangs, faults, computes
/// wrong results or breaks the protocol, it drops out, and a fresh worker continues with the
/// others. Sets the outcome, timings, median and MAD of each candidate. Raises TuneError if no
/// worker starts or if the default tile drops out.
void run_trials(const std::vector<std::string>& worker, const BenchSetup&, std::vector<Candidate>&,
                const TrialLimits&, const TrialProgress& = nullptr);

} // namespace tuner
} // namespace sagebwd
