//===- tuner.cpp - Finding the best tile for this GPU ------------------------===//

#include "runtime/tuner/tuner.h"

#include "cache/lock.h"
#include "generator/space.h"
#include "runtime/compile_width.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/nvrtc/ptxas_report.h"
#include "runtime/tuner/selection.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace sagebwd {
namespace {

using tuner::Candidate;

/// How long a rank waits for rank 0 to begin.
constexpr std::chrono::seconds kRankGrace{20};

Pass pass_of(KernelKind kind) {
  return kind == KernelKind::forward ? Pass::forward : Pass::backward;
}

/// The kernels of the operation up to one kind, in launch order, with default tiles.
std::vector<KernelSpec> operation_of(KernelKind kind, const AttentionSpec& spec, const Arch& arch) {
  std::vector<KernelSpec> kernels = kernels_of(Pass::forward, spec, arch);
  if (pass_of(kind) == Pass::backward)
    for (const KernelSpec& kernel : kernels_of(Pass::backward, spec, arch))
      kernels.push_back(kernel);
  while (kernels.back().kind != kind) // dQ's kernel does not need dK's and dV's
    kernels.pop_back();
  return kernels;
}

BenchKernel bench_kernel(const BuiltKernel& built) {
  return {built.spec, built.entry.kernel_name, built.entry.cubin, built.threads,
          built.shared_bytes};
}

/// What is kept now, whoever kept it, unless it is of another compiler.
std::optional<TuningRecord> current_record(const CacheKey& key, const TuneSurroundings& around) {
  std::optional<TuningRecord> record = around.records.reload(key);
  if (record && !around.compiler.empty() && record->compiler != around.compiler)
    record.reset();
  return record;
}

/// By what the compiler says of it, in few words.
void drop(TriedTile& tried, const CompileError& error) {
  const auto report = nvrtc::parse_ptxas_report(error.log);
  const std::vector<std::string> warnings = compile_warnings(error.log);
  if (report && report->spill_bytes > 0) {
    tried.outcome = "spills";
    tried.detail = std::to_string(report->spill_bytes) + " bytes";
  } else {
    tried.outcome = "not compiled";
    tried.detail = warnings.empty() ? error.what() : warnings.front();
  }
}

/// Tuning one kernel.
class KernelTuning {
public:
  KernelTuning(KernelKind kind, const TuneRequest& request, const TuneSurroundings& around)
      : kind_(kind), request_(request), around_(around),
        spec_(resolved(request.spec, around.gpu.arch)), tiles_(candidates()),
        key_(record_key(kind, spec_, around.gpu,
                        bucket_of(kind, request.problem, around.gpu.sm_count))) {}

  /// Beside the default, or the default itself where it is named.
  bool has_candidates() const {
    return tiles_.size() > 1 || request_.only.empty() || only_default_;
  }
  Tuned run();

private:
  std::vector<TileConfig> candidates();
  std::optional<TuningRecord> up_to_date();
  std::vector<Candidate> compile();
  BenchSetup setup();
  TuningRecord measure();
  void report(const std::string& stage, const std::string& tile, int done, int total) const {
    if (request_.progress)
      request_.progress({kind_, stage, tile, done, total});
  }

  KernelKind kind_;
  const TuneRequest& request_;
  const TuneSurroundings& around_;
  AttentionSpec spec_;
  bool only_default_ = false; ///< what was asked for is the default alone
  std::vector<TileConfig> tiles_;
  CacheKey key_;
};

std::vector<TileConfig> KernelTuning::candidates() {
  const Arch& arch = around_.gpu.arch;
  if (request_.only.empty())
    return tiles_worth_trying(kind_, spec_, arch);
  std::vector<TileConfig> tiles = {default_tile(kind_, spec_, arch)};
  for (const TileConfig& tile : request_.only) {
    if (tile == tiles.front())
      only_default_ = true;
    else if (objection_to_trying(kind_, spec_, tile, arch).empty() &&
             std::find(tiles.begin(), tiles.end(), tile) == tiles.end())
      tiles.push_back(tile);
  }
  return tiles;
}

std::optional<TuningRecord> KernelTuning::up_to_date() {
  if (request_.force)
    return std::nullopt;
  return current_record(key_, around_);
}

std::vector<Candidate> KernelTuning::compile() {
  std::vector<Candidate> candidates(tiles_.size());
  std::atomic<size_t> next{0};
  std::atomic<int> done{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < tiles_.size();) {
      Candidate& candidate = candidates[i];
      candidate.tried.tile = to_string(tiles_[i]);
      KernelSpec spec = operation_of(kind_, spec_, around_.gpu.arch).back();
      spec.tile = tiles_[i];
      try {
        const std::shared_ptr<const BuiltKernel> built = around_.build(spec);
        candidate.kernel = bench_kernel(*built);
        if (i > 0 && built->entry.spill_bytes > 0) {
          candidate.tried.outcome = "spills";
          candidate.tried.detail = std::to_string(built->entry.spill_bytes) + " bytes";
        }
      } catch (const CompileError& error) {
        drop(candidate.tried, error);
      } catch (const std::exception& error) {
        candidate.tried.outcome = "not compiled";
        candidate.tried.detail = error.what();
      }
      report("compiling", candidate.tried.tile, ++done, static_cast<int>(tiles_.size()));
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (size_t i = 1; i < std::min(tiles_.size(), compile_width()); ++i)
      helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those there are do the work.
  }
  work();
  for (std::thread& helper : helpers)
    helper.join();
  return candidates;
}

BenchSetup KernelTuning::setup() {
  BenchSetup setup;
  setup.device = request_.device;
  setup.spec = spec_;
  setup.problem = request_.problem;
  setup.kind = kind_;
  setup.exact = spec_.deterministic;
  for (const KernelSpec& kernel : operation_of(kind_, spec_, around_.gpu.arch))
    setup.operation.push_back(bench_kernel(*around_.build(kernel)));
  return setup;
}

TuningRecord KernelTuning::measure() {
  const BenchSetup bench = setup(); // raises what is wrong with the default
  std::vector<Candidate> candidates = compile();
  if (candidates.size() > 1 && std::all_of(candidates.begin() + 1, candidates.end(), [](auto& c) {
        return c.tried.outcome == "not compiled";
      }))
    throw TuneError("there is nothing to choose from: no candidate for " +
                    std::string(to_string(kind_)) +
                    " compiles; the first of them: " + candidates[1].tried.detail);
  const auto progress = [&](const std::string& stage, const std::string& tile, int done,
                            int total) { report(stage, tile, done, total); };
  {
    // Two tunings on one GPU would time each other. The host's name: many share a directory.
    char host[256] = "";
    ::gethostname(host, sizeof(host) - 1);
    const CacheStore& store = around_.records.store();
    const KeyLock gpu(store.disabled_reason().empty() ? store.directory() : "",
                      sha256_hex("tuning on " + around_.gpu.name + " " +
                                 std::to_string(request_.device) + " of " + host),
                      request_.wait_limit, [] { return false; });
    run_trials(worker_command(request_.worker), bench, candidates, request_.limits, progress);
  }
  TuningRecord record;
  record.key = key_;
  record.default_tile = candidates.front().tried.tile;
  record.compiler = around_.compiler;
  std::vector<std::optional<Timing>> timings;
  for (const Candidate& candidate : candidates) {
    const TriedTile& tried = candidate.tried;
    timings.push_back(tried.outcome == "timed"
                          ? std::optional(Timing{tried.median_ms, tried.mad_ms})
                          : std::nullopt);
    record.candidates.push_back(tried);
  }
  record.tile = candidates[winner_of(timings)].tried.tile;
  return record;
}

Tuned KernelTuning::run() {
  if (std::optional<TuningRecord> record = up_to_date())
    return {kind_, std::move(*record), /*fresh=*/false, /*kept=*/true};
  const CacheStore& store = around_.records.store();
  const KeyLock lock(store.disabled_reason().empty() ? store.directory() : "", key_.digest,
                     request_.wait_limit, [&] { return up_to_date().has_value(); });
  if (std::optional<TuningRecord> record = up_to_date()) // of whoever had the lock until now
    return {kind_, std::move(*record), /*fresh=*/false, /*kept=*/true};
  Tuned tuned{kind_, measure(), /*fresh=*/true, /*kept=*/true};
  tuned.kept = around_.records.keep(tuned.record);
  return tuned;
}

std::string describe(KernelKind kind, const TuneRequest& request, const TuneSurroundings& around) {
  const AttentionSpec spec = resolved(request.spec, around.gpu.arch);
  return std::string(to_string(kind)) + " of " + to_string(spec) + " for " +
         to_string(bucket_of(kind, request.problem, around.gpu.sm_count)) + " on " +
         around.gpu.name + " (" + std::to_string(around.gpu.sm_count) + " SMs, driver " +
         around.gpu.driver + ")";
}

std::string tune_command(const TuneRequest& request, const Arch& arch) {
  const AttentionSpec spec = resolved(request.spec, arch);
  const Problem& p = request.problem;
  std::string command =
      "sagebwd tune --head-dim " + std::to_string(spec.head_dim) + " --dtype " +
      std::string(to_string(spec.dtype)) + " --causal " + std::string(to_string(spec.causal)) +
      " --granularity " + std::string(to_string(spec.granularity)) + " --precision " +
      std::string(to_string(spec.precision)) + " --group-q " + std::to_string(spec.group_q) +
      " --group-kv " + std::to_string(spec.group_kv);
  if (!spec.smooth_k)
    command += " --no-smooth-k";
  if (!spec.rotate)
    command += " --no-rotate";
  if (!spec.deterministic)
    command += " --no-deterministic";
  return command + " --batch " + std::to_string(p.batch) + " --heads " + std::to_string(p.heads) +
         " --heads-kv " + std::to_string(p.heads_kv) + " --seq-len " + std::to_string(p.seq_q) +
         " --seq-kv " + std::to_string(p.seq_kv) + " --gpu " + std::to_string(request.device);
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
  if (settings().rank.value_or(0) == 0) {
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

std::vector<Tuned> tune(const TuneRequest& request, const TuneSurroundings& around) {
  check(resolved(request.spec, around.gpu.arch), request.problem);
  std::vector<KernelTuning> tunings;
  for (KernelKind kind : request.kernels) {
    KernelTuning tuning(kind, request, around);
    if (tuning.has_candidates())
      tunings.push_back(std::move(tuning));
  }
  if (tunings.empty()) {
    std::string why = "there is no candidate: ";
    for (const TileConfig& tile : request.only)
      for (KernelKind kind : request.kernels)
        why += "\n  '" + to_string(tile) + "' for " + std::string(to_string(kind)) + ": " +
               objection_to_trying(kind, resolved(request.spec, around.gpu.arch), tile,
                                   around.gpu.arch);
    throw SpecError(why);
  }
  std::vector<Tuned> results;
  for (KernelTuning& tuning : tunings)
    results.push_back(tuning.run());
  return results;
}

std::vector<Tuned> tune(const TuneRequest& request) {
  return tune(request, surroundings_of(request.device, TuneMode::tune));
}

TuneSurroundings surroundings_of(int device, TuneMode mode) {
  TuneSurroundings around{user_records(), gpu_of(device),
                          [](const KernelSpec& spec) { return build(spec); }, ""};
  try {
    if (mode == TuneMode::tune)
      around.compiler = Nvrtc::instance().identity();
  } catch (const LibraryError&) {
    // Records that are there can be read without a compiler; tuning will say what is missing.
  }
  return around;
}

TileConfig chosen_tile(TuneMode mode, KernelKind kind, const TuneRequest& request,
                       const TuneSurroundings& around) {
  const Arch& arch = around.gpu.arch;
  const AttentionSpec spec = resolved(request.spec, arch);
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

} // namespace sagebwd
