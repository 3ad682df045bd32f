//===- tuner.h - Find the best tile for this GPU --------------------------===//
//
// The tuner selects candidates by formulas, then by the compiler's report, and then times them in a
// separate process. The default tile wins unless another tile is faster beyond the margin of
// selection.h and gives the same results.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/definition.h"
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
  std::string stage; ///< "compiling", "vetting" or "timing"
  std::string tile;
  int done = 0, total = 0; ///< steps of this stage
};

struct TuneRequest {
  AttentionSpec spec; ///< may be unresolved: tune() and TileChoice resolve it once
  Problem problem;
  int device = 0;
  /// Each kernel is tuned separately and has a record of its own. Kernels that the operation does
  /// not launch (tunable_kernels()) are skipped.
  std::vector<KernelKind> kernels = tiled_kernels();
  /// If not empty, only these tiles compete with the default tile, and kernels which support none
  /// of them are skipped. Empty: all tiles that are worth trying compete.
  std::vector<TileConfig> only;
  bool force = false; ///< tune again even if there is a record
  /// The command that runs candidates; see worker/command.h.
  std::vector<std::string> worker;
  tuner::TrialLimits limits;
  /// How long to wait for another process that tunes the same key or on the same GPU.
  std::chrono::milliseconds wait_limit{300000};
  /// Called on the calling thread. If it raises, tuning ends.
  std::function<void(const TuneProgress&)> progress;
};

/// The result for one kernel.
struct Tuned {
  KernelKind kernel;
  TuningRecord record;
  bool fresh = false; ///< true: tuned now; false: the record existed
  bool kept = true;   ///< the record is on disk
};

/// Everything that the tuner uses from outside except the GPU itself: records, compiler, worker.
/// Tests replace it.
struct TuneSurroundings {
  Records& records;
  Gpu gpu;
  std::function<std::shared_ptr<const BuiltKernel>(const KernelSpec&)> build;
  /// The identity of the compiler whose records are up to date; empty: every record is. Only tuning
  /// calls it.
  std::function<std::string()> compiler;
  int rank = 0;       ///< the rank of this process in its group
  std::string worker; ///< the argument `named` of worker_command()
};

/// Tunes the kernels without an up-to-date record, and keeps the results. A record is not up to
/// date if it is of another compiler, or of a choice among fewer tiles. Raises SpecError (there is
/// nothing to choose from, or the problem is impossible or too large for the GPU), LibraryError or
/// TuneError. An error that this thread's watch (ScopedWatch) raises ends the tuning.
std::vector<Tuned> tune(const TuneRequest&);
std::vector<Tuned> tune(const TuneRequest&, const TuneSurroundings&);

/// The surroundings that tune() uses.
TuneSurroundings surroundings_of(int device);

/// The record that is kept now, by any process; nothing if the record is of another compiler.
std::optional<TuningRecord> current_record(const CacheKey&, const TuneSurroundings&);

} // namespace sagebwd
