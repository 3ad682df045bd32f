//===- tile_choice.cpp - The tiles of one operation on one device ------------===//

#include "runtime/tuner/tile_choice.h"

#include "cache/lock.h"
#include "generator/space.h"
#include "runtime/parallel_for.h"

#include <cstdio>
#include <thread>

namespace sagebwd {
namespace {

/// How long a rank waits for rank 0 to begin.
constexpr std::chrono::seconds kRankGrace{20};

std::string describe(KernelKind kind, const TuneRequest& request, const TuneSurroundings& around) {
  const ResolvedSpec spec = resolved(request.spec, around.gpu.arch);
  return std::string(to_string(kind)) + " of " + to_string(*spec) + " for " +
         to_string(bucket_of(kind, request.problem, around.gpu.sm_count)) + " on " +
         around.gpu.name + " (" + std::to_string(around.gpu.sm_count) + " SMs, driver " +
         around.gpu.driver + ")";
}

std::string tune_command(const TuneRequest& request, const Arch& arch) {
  const ResolvedSpec spec = resolved(request.spec, arch);
  const Problem& p = request.problem;
  return "sagebwd tune --spec '" + to_string(*spec) + "' --batch " + std::to_string(p.batch) +
         " --heads " + std::to_string(p.heads) + " --heads-kv " + std::to_string(p.heads_kv) +
         " --seq-len " + std::to_string(p.seq_q) + " --seq-kv " + std::to_string(p.seq_kv) +
         " --gpu " + std::to_string(request.device);
}

void warn(const std::string& what) { std::fprintf(stderr, "sagebwd: warning: %s\n", what.c_str()); }

/// Whether a process holds the lock under which a record is tuned.
bool somebody_tunes(const CacheStore& store, const CacheKey& key) {
  const KeyLock lock(store.directory(), key.digest, std::chrono::milliseconds(0),
                     [] { return false; });
  return lock.waited();
}

/// Nothing where none comes in time, or nobody is making one: rank 0 may never meet this problem,
/// or keep its records elsewhere.
std::optional<TuningRecord> wait_for_record(const CacheKey& key, const TuneRequest& request,
                                            const TuneSurroundings& around) {
  const CacheStore& store = around.records.store();
  std::optional<TuningRecord> record = current_record(key, around);
  if (record || !store.disabled_reason().empty())
    return record;
  std::fprintf(stderr, "sagebwd: waiting for rank 0 to tune (SAGEBWD_TUNE=tune)\n");
  const auto start = std::chrono::steady_clock::now();
  auto seen = start; // of somebody at work
  for (;;) {
    check_interrupt();
    const auto now = std::chrono::steady_clock::now();
    if (somebody_tunes(store, key))
      seen = now;
    if ((record = current_record(key, around)) || now - start >= request.wait_limit ||
        now - seen >= kRankGrace)
      return record;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

/// The record that mode `tune` runs with. A training step does not fail for what cannot be tuned.
std::optional<TuningRecord> tuned_or_awaited(KernelKind kind, const CacheKey& key,
                                             const TuneRequest& request,
                                             const TuneSurroundings& around) {
  if (around.records.is_given_up(key)) // not tried at every call
    return current_record(key, around);
  std::string why;
  if (around.rank == 0) {
    TuneRequest one = request;
    one.kernels = {kind};
    try {
      return tune(one, around).front().record;
    } catch (const std::exception& error) {
      why = error.what();
    }
  } else if (std::optional<TuningRecord> record = wait_for_record(key, request, around)) {
    return record;
  } else {
    why = "rank 0 left no record";
  }
  around.records.give_up(key);
  warn(describe(kind, request, around) + " is not tuned: " + why + "; the default tile is used");
  return std::nullopt;
}

} // namespace

TileConfig chosen_tile(TuneMode mode, KernelKind kind, const TuneRequest& request,
                       const TuneSurroundings& around) {
  const Arch& arch = around.gpu.arch;
  const ResolvedSpec spec = resolved(request.spec, arch);
  const TileConfig fallback = default_tile(kind, spec, arch);
  if (mode == TuneMode::off)
    return fallback;
  const CacheKey key =
      record_key(kind, spec, around.gpu, bucket_of(kind, request.problem, around.gpu.sm_count));
  std::optional<TuningRecord> record;
  if (mode != TuneMode::tune)
    record = around.records.find(key);
  else
    record = tuned_or_awaited(kind, key, request, around);
  if (!record && mode == TuneMode::frozen)
    throw TuneError("SAGEBWD_TUNE=frozen, and there is no tuning record of " +
                    describe(kind, request, around) +
                    ". Where such a GPU is, run: " + tune_command(request, arch) +
                    "; 'sagebwd tune --export' and '--import' move records between machines");
  if (!record)
    return fallback;
  try {
    return tile_of(*record, kind, spec, arch);
  } catch (const SpecError& error) {
    const std::string what = "the tuning record " + key.digest + " of " +
                             describe(kind, request, around) + " cannot be used: " + error.what();
    if (mode == TuneMode::frozen)
      throw TuneError(what);
    warn(what + "; the default tile is used");
    return fallback;
  }
}

TileChoice::TileChoice(const ResolvedSpec& spec, const Arch& arch, int device, int sm_count,
                       const std::optional<Tiles>& given)
    : spec_(spec), arch_(arch), device_(device), sm_count_(sm_count), given_(given),
      mode_(settings().tune) {
  if (!fixed())
    records_ = &user_records();
}

size_t TileChoice::bucket(Pass pass, const Problem& problem) const {
  if (fixed())
    return 0;
  size_t index = 0; // of two kernels at most, whether each fills the GPU; then 8 classes of lengths
  for (KernelKind kind : tiled_kernels(pass))
    index = index * 2 + bucket_of(kind, problem, sm_count_).full;
  const Bucket lengths = bucket_of(tiled_kernels(pass).front(), problem, sm_count_);
  static_assert(kBuckets == 4 * 8 * 8);
  return (index * 8 + lengths.seq_q) * 8 + lengths.seq_kv;
}

const TuneSurroundings& TileChoice::surroundings(TuneMode mode) {
  auto& known = mode == TuneMode::tune ? surroundings_to_tune_ : surroundings_;
  if (!known)
    known.emplace(surroundings_of(device_, mode));
  return *known;
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem, TuneMode mode) {
  const TuneSurroundings& around = surroundings(mode);
  TuneRequest request;
  request.spec = spec_;
  request.problem = problem;
  request.device = device_;
  bool said = false;
  request.progress = [&](const TuneProgress& progress) {
    if (progress.stage == "compiling" && progress.done == progress.total && !said) {
      said = true;
      std::fprintf(stderr, "sagebwd: tuning %s of %s (SAGEBWD_TUNE=tune), %d candidates\n",
                   std::string(to_string(kind)).c_str(), to_string(*spec_).c_str(), progress.total);
    }
  };
  return chosen_tile(mode, kind, request, around);
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem) {
  if (!given_)
    return tile(kind, problem, mode_);
  const auto found = given_->find(kind);
  return found == given_->end() ? default_tile(kind, spec_, arch_) : found->second;
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem, TuneMode mode) {
  if (fixed())
    return by_default(pass);
  Tiles tiles;
  for (KernelKind kind : tiled_kernels(pass))
    tiles[kind] = tile(kind, problem, mode);
  return kernels_of(pass, spec_, arch_, tiles);
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem) {
  return kernels(pass, problem, mode_);
}

std::vector<KernelSpec> TileChoice::without_tuning(Pass pass, const Problem& problem) {
  return kernels(pass, problem, mode_ == TuneMode::tune ? TuneMode::use : mode_);
}

std::vector<KernelSpec> TileChoice::by_default(Pass pass) const {
  return kernels_of(pass, spec_, arch_, given_.value_or(Tiles{}));
}

} // namespace sagebwd
