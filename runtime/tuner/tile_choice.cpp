//===- tile_choice.cpp - Choose the tiles of an operation on a device -----===//

#include "runtime/tuner/tile_choice.h"

#include "cache/lock.h"
#include "generator/choice.h"
#include "generator/definition.h"
#include "generator/operation.h"
#include "generator/space.h"
#include "runtime/parallel_for.h"

#include <algorithm>
#include <cstdio>
#include <thread>

namespace sagebwd {
namespace {

/// How long a rank waits for rank 0 to begin.
constexpr std::chrono::seconds kRankGrace{20};

void warn(const std::string& what) { std::fprintf(stderr, "sagebwd: warning: %s\n", what.c_str()); }

/// Chooses the tile of one kernel.
class KernelChoice {
public:
  KernelChoice(KernelKind kind, const TuneRequest& request, const TuneSurroundings& around)
      : kind_(kind), request_(request), around_(around),
        spec_(resolved(request.spec).as_in_records()),
        bucket_(bucket_of(kind, request.problem, around.gpu.sm_count)),
        key_(record_key(kind, spec_, around.gpu, bucket_)) {}

  TileConfig by(TuneMode);

private:
  std::optional<TuningRecord> awaited();
  std::optional<TuningRecord> tuned_or_awaited();
  std::string describe() const;
  std::string tune_command() const;

  KernelKind kind_;
  const TuneRequest& request_;
  const TuneSurroundings& around_;
  ResolvedSpec spec_;
  Bucket bucket_;
  CacheKey key_;
};

std::string KernelChoice::describe() const {
  const Gpu& gpu = around_.gpu;
  return std::string(to_string(kind_)) + " of " + to_string(*spec_) + " for " + to_string(bucket_) +
         " on " + gpu.name + " (" + std::to_string(gpu.sm_count) + " SMs, driver " + gpu.driver +
         ")";
}

std::string KernelChoice::tune_command() const {
  const Problem& p = request_.problem;
  return "sagebwd tune --spec '" + to_string(*spec_) + "' --batch " + std::to_string(p.batch) +
         " --heads " + std::to_string(p.heads) + " --heads-kv " + std::to_string(p.heads_kv) +
         " --seq-len " + std::to_string(p.seq_q) + " --seq-kv " + std::to_string(p.seq_kv) +
         " --gpu " + std::to_string(request_.device);
}

/// Waits for a record of rank 0. Returns nothing if no record comes in time or nobody is tuning:
/// rank 0 may never meet this problem, or may keep its records elsewhere.
std::optional<TuningRecord> KernelChoice::awaited() {
  const CacheStore& store = around_.records.store();
  std::optional<TuningRecord> record = current_record(key_, around_);
  if (record || !store.disabled_reason().empty())
    return record;
  std::fprintf(stderr, "sagebwd: waiting for rank 0 to tune (SAGEBWD_TUNE=tune)\n");
  const auto start = std::chrono::steady_clock::now();
  auto seen = start; // the last time at which a process was seen to hold the lock under which a
                     // record is tuned
  for (;;) {
    check_interrupt();
    const auto now = std::chrono::steady_clock::now();
    if (KeyLock(store.directory(), key_.digest, std::chrono::milliseconds(0), [] {
          return false;
        }).waited())
      seen = now;
    if ((record = current_record(key_, around_)) || now - start >= request_.wait_limit ||
        now - seen >= kRankGrace)
      return record;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

/// The record for mode `tune`. If a kernel cannot be tuned, the default tile runs, so that a
/// training step does not fail.
std::optional<TuningRecord> KernelChoice::tuned_or_awaited() {
  if (around_.records.is_given_up(key_)) // so that a failure is not repeated at every call
    return current_record(key_, around_);
  std::string why = "rank 0 left no record";
  if (around_.rank == 0) {
    TuneRequest one = request_;
    one.kernels = {kind_};
    try {
      return tune(one, around_).front().record;
    } catch (const std::exception& error) {
      why = error.what();
    }
  } else if (std::optional<TuningRecord> record = awaited()) {
    return record;
  }
  around_.records.give_up(key_);
  warn(describe() + " is not tuned: " + why + "; the default tile is used");
  return std::nullopt;
}

TileConfig KernelChoice::by(TuneMode mode) {
  const TileConfig fallback = default_tile(kind_, spec_, around_.gpu.arch);
  const std::optional<TuningRecord> record =
      mode == TuneMode::tune ? tuned_or_awaited() : around_.records.find(key_);
  if (!record && mode == TuneMode::frozen)
    throw TuneError("SAGEBWD_TUNE=frozen, and there is no tuning record of " + describe() +
                    ". On a machine with this kind of GPU, run: " + tune_command() +
                    "; 'sagebwd tune --export' and '--import' move records between machines");
  if (!record)
    return fallback;
  try {
    return tile_of(*record, kind_, spec_, around_.gpu.arch);
  } catch (const SpecError& error) {
    const std::string what = "the tuning record " + key_.digest + " of " + describe() +
                             " cannot be used: " + error.what();
    if (mode == TuneMode::frozen)
      throw TuneError(what);
    warn(what + "; the default tile is used");
    return fallback;
  }
}

} // namespace

TileConfig chosen_tile(TuneMode mode, KernelKind kind, const TuneRequest& request,
                       const TuneSurroundings& around) {
  if (mode == TuneMode::off)
    return default_tile(kind, resolved(request.spec), around.gpu.arch);
  return KernelChoice(kind, request, around).by(mode);
}

TileChoice::TileChoice(const Operation& operation, int device, int sm_count, bool own_tiles)
    : operation_(operation), device_(device), sm_count_(sm_count), own_tiles_(own_tiles),
      mode_(settings().tune) {
  if (!own_tiles_ && mode_ != TuneMode::off)
    records_ = &user_records();
}

size_t TileChoice::bucket(Pass pass, const Problem& given) const {
  if (fixed(pass))
    return 0;
  const Problem problem = of_mean_lengths(operation_.spec(), given); // whose records serve it
  // 1 bit for each of at most two kernels (whether it fills the GPU), then 8 classes of lengths.
  size_t index = 0;
  for (KernelKind kind : tiled_kernels(pass))
    index = index * 2 + bucket_of(kind, problem, sm_count_).full;
  const Bucket lengths = bucket_of(tiled_kernels(pass).front(), problem, sm_count_);
  static_assert(kBuckets == 4 * 8 * 8);
  return (index * 8 + lengths.seq_q) * 8 + lengths.seq_kv;
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem, bool may_tune) {
  const Pass pass = tiling_of(kind).pass;
  const std::vector<KernelSpec> kernels = operation_.kernels(pass);
  const auto launched = std::find_if(kernels.begin(), kernels.end(),
                                     [&](const KernelSpec& kernel) { return kernel.kind == kind; });
  if (launched == kernels.end())
    throw SpecError(std::string(to_string(kind)) + " is not launched: the backward of " +
                    to_string(*operation_.spec()) + " is " +
                    (operation_.fused() ? "fused" : "split") + " on " +
                    std::string(operation_.arch().name));
  if (fixed(pass))
    return launched->tile;
  if (!surroundings_)
    surroundings_.emplace(surroundings_of(device_));
  TuneRequest request;
  request.spec = operation_.spec().as_in_records();
  request.spec.packed = false;
  request.problem = of_mean_lengths(operation_.spec(), problem);
  request.device = device_;
  bool said = false;
  request.progress = [&](const TuneProgress& progress) {
    if (progress.stage == "compiling" && progress.done == progress.total && !said) {
      said = true;
      std::fprintf(stderr, "sagebwd: tuning %s of %s (SAGEBWD_TUNE=tune), %d candidates\n",
                   std::string(to_string(kind)).c_str(), to_string(*operation_.spec()).c_str(),
                   progress.total);
    }
  };
  const TuneMode mode = mode_ == TuneMode::tune && !may_tune ? TuneMode::use : mode_;
  const TileConfig chosen = chosen_tile(mode, kind, request, *surroundings_);
  // The kernel of a packed spec needs a little more shared memory, so a tile may not fit.
  return objection(kind, operation_.spec(), chosen, operation_.arch()).empty() ? chosen
                                                                               : launched->tile;
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem, bool may_tune) {
  if (fixed(pass))
    return operation_.kernels(pass);
  Tiles tiles;
  for (KernelKind kind : tiled_kernels(pass))
    tiles[kind] = tile(kind, problem, may_tune);
  return Operation(operation_.spec(), operation_.arch(), tiles).kernels(pass);
}

} // namespace sagebwd
