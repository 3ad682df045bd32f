//===- tuner.h - Finding the best tile for this GPU -------------------------===//
//
// Candidates by formulas, then by what the compiler says of them, then by timing in a process of
// its own. The default wins unless another is faster beyond doubt, with the same results.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/kernels.h"
#include "runtime/settings.h"
#include "runtime/tuner/records.h"
#include "runtime/tuner/trials.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sagebwd {

struct TuneProgress {
  KernelKind kernel;
  std::string stage; ///< "compiling", "vetting", "timing"
  std::string tile;
  int done = 0, total = 0; ///< steps of this stage
};

struct TuneRequest {
  AttentionSpec spec; ///< need not be resolved: tune() and TileChoice do it, once
  Problem problem;
  int device = 0;
  /// Each is tuned by itself and has a record of its own. Those that the operation does not launch
  /// (tunable_kernels()) are left out.
  std::vector<KernelKind> kernels = tiled_kernels();
  /// Only these compete with the default; kernels that none of them suits are left out. Empty: all
  /// that are worth trying.
  std::vector<TileConfig> only;
  bool force = false; ///< tune again what has a record
  /// What runs candidates; see worker/command.h.
  std::vector<std::string> worker;
  tuner::TrialLimits limits;
  /// For another process that tunes the same.
  std::chrono::milliseconds wait_limit{300000};
  /// On the calling thread; what it raises ends the tuning.
  std::function<void(const TuneProgress&)> progress;
};

/// One kernel's outcome.
struct Tuned {
  KernelKind kernel;
  TuningRecord record;
  bool fresh = false; ///< tuned now; else the record was there
  bool kept = true;   ///< on disk
};

/// The tuner's surroundings, apart from the GPU of this process: what tests replace.
struct TuneSurroundings {
  Records& records;
  Gpu gpu;
  std::function<std::shared_ptr<const BuiltKernel>(const KernelSpec&)> build;
  /// Whose records are up to date; empty: anyone's. Asked by tuning alone.
  std::function<std::string()> compiler;
  int rank = 0;       ///< of this process in its group
  std::string worker; ///< see worker_command()
};

/// Tunes what has no record, or one of another compiler or of a choice among fewer tiles, and keeps
/// what it finds. Raises SpecError (nothing to choose from, a problem that is impossible or too
/// large for the GPU), LibraryError or TuneError; what the thread's watch raises ends it.
std::vector<Tuned> tune(const TuneRequest&);
std::vector<Tuned> tune(const TuneRequest&, const TuneSurroundings&);

/// The surroundings that tune() uses.
TuneSurroundings surroundings_of(int device);

/// What is kept now, whoever kept it, unless it is of another compiler.
std::optional<TuningRecord> current_record(const CacheKey&, const TuneSurroundings&);

} // namespace sagebwd
