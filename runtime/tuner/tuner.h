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
  AttentionSpec spec; ///< need not be resolved
  Problem problem;
  int device = 0;
  /// Each is tuned by itself and has a record of its own.
  std::vector<KernelKind> kernels = {KernelKind::forward, KernelKind::backward_dq,
                                     KernelKind::backward_dkv};
  /// Only these compete with the default; kernels that none of them suits are left out. Empty: all
  /// that are worth trying.
  std::vector<TileConfig> only;
  bool force = false; ///< tune again what has a record
  /// What runs candidates; see worker_command().
  std::vector<std::string> worker;
  tuner::TrialLimits limits;
  /// For another process that tunes the same.
  std::chrono::milliseconds wait_limit{300000};
  std::function<void(const TuneProgress&)> progress; ///< from several threads; must not throw
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
  std::string compiler; ///< whose records are up to date; empty: anyone's
};

/// Tunes what has no record, or a record of another compiler, and keeps what it finds. Raises
/// SpecError (nothing to choose from, an impossible problem), LibraryError or TuneError.
std::vector<Tuned> tune(const TuneRequest&);
std::vector<Tuned> tune(const TuneRequest&, const TuneSurroundings&);

/// The command of a worker: `given`, else SAGEBWD_TUNE_WORKER (the path of a sagebwd), else
/// set_tune_worker()'s, else this executable where it is sagebwd, else a sagebwd beside it or in
/// PATH. Raises TuneError.
std::vector<std::string> worker_command(const std::vector<std::string>& given = {});
/// For programs that bring a worker of their own, such as a Python interpreter.
void set_tune_worker(std::vector<std::string> command);

/// Which tile a kernel runs with: by the mode the default's, a record's, or the one that tuning now
/// finds. Under TuneMode::tune, ranks but 0 wait for a record of rank 0; where none comes, or
/// tuning fails, the default is taken with one warning. Raises TuneError: frozen, and no record.
TileConfig chosen_tile(TuneMode, KernelKind, const TuneRequest&, const TuneSurroundings&);
/// The surroundings that tune() uses. Under TuneMode::tune this opens NVRTC.
TuneSurroundings surroundings_of(int device, TuneMode);

} // namespace sagebwd
