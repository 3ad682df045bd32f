//===- trials.h - Candidates against each other -----------------------------===//
#pragma once

#include "cache/record.h"
#include "runtime/tuner/worker/bench.h"

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sagebwd {

/// Tuning could not be done at all. Candidates that drop out are no error.
class TuneError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

namespace tuner {

/// A tile that compiled, and what became of it. `tried.outcome` stays empty until it drops out or
/// is timed.
struct Candidate {
  BenchKernel kernel;
  TriedTile tried;
};

struct TrialLimits {
  std::chrono::milliseconds open{60000};   ///< a worker's start, buffers and the default's outputs
  std::chrono::milliseconds vet{5000};     ///< one candidate's, or ten times the default's
  std::chrono::milliseconds launch{5000};  ///< one timed launch, beside 20 times what vetting took
  std::chrono::milliseconds timing{15000}; ///< of all rounds together: decides how many there are
  int rounds = 15;                         ///< at most; at least kFewestRounds
};
inline constexpr int kFewestRounds = 5;

/// "vetting" or "timing", the tile that is done, and how many of how many steps are.
using TrialProgress =
    std::function<void(const std::string& stage, const std::string& tile, int done, int total)>;

/// Vets and times candidates in workers. The first is the default; it and those before `outcome`
/// is set take part. One that crashes, hangs, faults, is wrong or makes its worker talk nonsense
/// loses by itself: a fresh worker serves the rest. Sets outcome, timings, median and MAD of each.
/// Raises TuneError where no worker starts or the default itself drops out.
void run_trials(const std::vector<std::string>& worker, const BenchSetup&, std::vector<Candidate>&,
                const TrialLimits&, const TrialProgress& = nullptr);

} // namespace tuner
} // namespace sagebwd
