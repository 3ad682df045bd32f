//===- tuner.cpp - Find the best tile for this GPU ------------------------===//

#include "runtime/tuner/tuner.h"

#include "cache/lock.h"
#include "generator/operation.h"
#include "runtime/compile_width.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/nvrtc/ptxas_report.h"
#include "runtime/parallel_for.h"
#include "runtime/prebuild_command.h"
#include "runtime/tuner/selection.h"
#include "runtime/tuner/worker/command.h"
#include "runtime/tuner/worker/gpu_bench.h"

#include <algorithm>
#include <cstdio>
#include <unistd.h>

namespace sagebwd {
namespace {

using tuner::Candidate;

BenchKernel bench_kernel(const BuiltKernel& built) {
  return {built.spec, built.entry.kernel_name, built.entry.cubin, built.threads,
          built.shared_bytes};
}

void drop_for_spills(TriedTile& tried, int bytes) {
  tried.outcome = "spills";
  tried.detail = std::to_string(bytes) + " bytes";
}

/// Sets the outcome by the compiler's error, in few words.
void drop(TriedTile& tried, const CompileError& error) {
  const auto report = nvrtc::parse_ptxas_report(error.log);
  if (report && report->spill_bytes > 0)
    return drop_for_spills(tried, report->spill_bytes);
  const std::vector<std::string> warnings = compile_warnings(error.log);
  tried.outcome = "not compiled";
  tried.detail = warnings.empty() ? error.what() : warnings.front();
}

/// Tunes one kernel.
class KernelTuning {
public:
  KernelTuning(TileContest contest, const Operation& operation, const TuneRequest& request,
               const TuneSurroundings& around)
      : contest_(std::move(contest)), operation_(operation), request_(request), around_(around),
        key_(record_key(contest_.kind, operation.spec(), around.gpu,
                        bucket_of(contest_.kind, request.problem, around.gpu.sm_count))) {}

  /// Whether there is a candidate other than the default, or the request names the default.
  bool has_candidates() const {
    return contest_.tiles.size() > 1 || request_.only.empty() ||
           includes(request_.only, contest_.tiles.front());
  }
  /// Raises SpecError if the problem does not fit into the GPU's memory.
  void check_memory() const;
  Tuned run();

private:
  std::optional<TuningRecord> up_to_date();
  Candidate compile(KernelSpec, const TileConfig&);
  void compile(BenchSetup&, std::vector<Candidate>&);
  TuningRecord measure();
  KeyLock lock(const std::string& digest, const std::function<bool()>& enough) const;
  void report(const std::string& stage, const std::string& tile, int done, int total) const {
    if (request_.progress)
      request_.progress({contest_.kind, stage, tile, done, total});
  }

  TileContest contest_;
  const Operation& operation_;
  const TuneRequest& request_;
  const TuneSurroundings& around_;
  CacheKey key_;
};

std::optional<TuningRecord> KernelTuning::up_to_date() {
  if (request_.force)
    return std::nullopt;
  std::optional<TuningRecord> record = current_record(key_, around_);
  const auto competed = [&](const TileConfig& tile) {
    return std::any_of(record->candidates.begin(), record->candidates.end(),
                       [&](const TriedTile& tried) { return tried.tile == to_string(tile); });
  };
  // Ignore a record of a choice among fewer tiles.
  if (record && !std::all_of(contest_.tiles.begin(), contest_.tiles.end(), competed))
    record.reset();
  return record;
}

/// Compiles a candidate. If the candidate cannot take part, its outcome says why.
Candidate KernelTuning::compile(KernelSpec spec, const TileConfig& tile) {
  Candidate candidate;
  candidate.tried.tile = to_string(tile);
  spec.tile = tile;
  try {
    const std::shared_ptr<const BuiltKernel> built = around_.build(spec);
    candidate.kernel = bench_kernel(*built);
    if (tile != contest_.tiles.front() && built->entry.spill_bytes > 0)
      drop_for_spills(candidate.tried, built->entry.spill_bytes);
  } catch (const Interrupted&) {
    throw;
  } catch (const CompileError& error) {
    drop(candidate.tried, error);
  } catch (const std::exception& error) {
    candidate.tried.outcome = "not compiled";
    candidate.tried.detail = error.what();
  }
  return candidate;
}

/// Compiles the operation with its default tiles, which must succeed, and the candidates.
void KernelTuning::compile(BenchSetup& bench, std::vector<Candidate>& candidates) {
  const std::vector<KernelSpec>& operation = contest_.operation;
  const std::vector<TileConfig>& tiles = contest_.tiles;
  const size_t others = operation.size();
  bench.operation.resize(others);
  candidates.resize(tiles.size());
  const auto build = [&](size_t i) {
    if (i < others)
      bench.operation[i] = bench_kernel(*around_.build(operation[i]));
    else
      candidates[i - others] = compile(operation.back(), tiles[i - others]);
  };
  int done = 0;
  try {
    parallel_for(others + tiles.size(), compile_width(), build, [&](size_t i) {
      if (i >= others)
        report("compiling", candidates[i - others].tried.tile, ++done,
               static_cast<int>(tiles.size()));
    });
  } catch (const OfflineError& error) {
    throw OfflineError(error.missing, prebuild_command(operation_.spec(), around_.gpu.arch));
  }
}

/// The check comes before anything is compiled.
void KernelTuning::check_memory() const {
  const double needed = bench_bytes(contest_.kind, operation_.built(), request_.problem);
  const double there = static_cast<double>(around_.gpu.memory_bytes);
  if (there == 0 || needed <= there)
    return;
  const auto in_gib = [](double bytes) {
    char text[64];
    std::snprintf(text, sizeof(text), "%.1f GiB", bytes / (1 << 30));
    return std::string(text);
  };
  const Problem& p = request_.problem;
  throw SpecError("tuning ", contest_.kind, " at batch ", p.batch, ", ", p.heads,
                  " heads, lengths ", p.seq_q, " and ", p.seq_kv, " takes ", in_gib(needed),
                  " of GPU memory, and ", around_.gpu.name, " has ", in_gib(there),
                  ": make it smaller (lengths over 65536 share one record)");
}

TuningRecord KernelTuning::measure() {
  BenchSetup bench{.device = request_.device,
                   .gpu = around_.gpu.uuid,
                   .spec = operation_.built(),
                   .problem = request_.problem,
                   .kind = contest_.kind,
                   .operation = {},
                   .exact = operation_.spec()->deterministic};
  std::vector<Candidate> candidates;
  compile(bench, candidates);
  if (candidates.size() > 1 && std::all_of(candidates.begin() + 1, candidates.end(), [](auto& c) {
        return c.tried.outcome == "not compiled";
      }))
    throw TuneError("there is nothing to choose from: no candidate for " +
                    std::string(to_string(contest_.kind)) +
                    " compiles; the first of them: " + candidates[1].tried.detail);
  const std::vector<std::string> worker = worker_command(request_.worker, around_.worker);
  {
    // Two tunings on one GPU would disturb each other's timings, so they exclude each other. The
    // digest includes the host's name, because many hosts may share a directory.
    char host[256] = "";
    ::gethostname(host, sizeof(host) - 1);
    const KeyLock gpu = lock(
        sha256_hex("tuning on " + around_.gpu.name + " " +
                   (around_.gpu.uuid.empty() ? std::to_string(request_.device) : around_.gpu.uuid) +
                   " of " + host),
        [] { return false; });
    run_trials(worker, bench, candidates, request_.limits,
               [&](const auto&... step) { report(step...); });
  }
  TuningRecord record;
  record.key = key_;
  record.default_tile = candidates.front().tried.tile;
  record.compiler = around_.compiler();
  std::vector<std::optional<Timing>> timings;
  for (const Candidate& candidate : candidates) {
    const TriedTile& tried = record.candidates.emplace_back(candidate.tried);
    timings.push_back(tried.outcome == "timed"
                          ? std::optional(Timing{tried.median_ms, tried.mad_ms})
                          : std::nullopt);
  }
  record.tile = candidates[winner_of(timings)].tried.tile;
  return record;
}

/// Waits for another process that tunes the same key or on the same GPU, for as long as the request
/// allows.
KeyLock KernelTuning::lock(const std::string& digest, const std::function<bool()>& enough) const {
  const CacheStore& store = around_.records.store();
  return KeyLock(store.disabled_reason().empty() ? store.directory() : "", digest,
                 request_.wait_limit, [&] {
                   check_interrupt();
                   return enough();
                 });
}

Tuned KernelTuning::run() {
  if (std::optional<TuningRecord> record = up_to_date())
    return {contest_.kind, std::move(*record), /*fresh=*/false, /*kept=*/true};
  const KeyLock mine = lock(key_.digest, [&] { return up_to_date().has_value(); });
  // The process that held the lock may have kept a record.
  if (std::optional<TuningRecord> record = up_to_date())
    return {contest_.kind, std::move(*record), /*fresh=*/false, /*kept=*/true};
  TuningRecord record = measure();
  const bool kept = around_.records.keep(record);
  return {contest_.kind, std::move(record), /*fresh=*/true, kept};
}

} // namespace

std::optional<TuningRecord> current_record(const CacheKey& key, const TuneSurroundings& around) {
  std::optional<TuningRecord> record = around.records.reload(key);
  const std::string compiler = record ? around.compiler() : "";
  if (!compiler.empty() && record->compiler != compiler)
    record.reset();
  return record;
}

std::vector<Tuned> tune(const TuneRequest& request, const TuneSurroundings& around) {
  const ResolvedSpec spec = resolved(request.spec).as_in_records();
  if (spec->packed)
    throw SpecError(
        "packed sequences are not tuned themselves: tune the spec without 'packed'; calls "
        "on packed sequences take its records, of their mean lengths");
  check(spec, request.problem);
  const Operation operation = Operation(spec, around.gpu.arch).for_call(request.problem);
  const std::vector<TileContest> contests = operation.contests(request.kernels, request.only);
  if (contests.empty())
    throw SpecError("there is nothing to tune: the backward of ", to_string(*spec),
                    " is one kernel on ", around.gpu.arch.name, ", which has its default tile");
  std::vector<KernelTuning> tunings;
  for (const TileContest& contest : contests) {
    KernelTuning tuning(contest, operation, request, around);
    tuning.check_memory();
    if (tuning.has_candidates())
      tunings.push_back(std::move(tuning));
  }
  if (tunings.empty()) {
    std::string why = "there is no candidate: ";
    for (size_t i = 0; i < request.only.size(); ++i)
      for (const TileContest& contest : contests)
        why += "\n  '" + to_string(request.only[i]) + "' for " +
               std::string(to_string(contest.kind)) + ": " + contest.objections[i];
    throw SpecError(why);
  }
  std::vector<Tuned> results;
  for (KernelTuning& tuning : tunings)
    results.push_back(tuning.run());
  return results;
}

std::vector<Tuned> tune(const TuneRequest& request) {
  return tune(request, surroundings_of(request.device));
}

TuneSurroundings surroundings_of(int device) {
  const auto compiler = []() -> std::string {
    try {
      return Nvrtc::instance().identity();
    } catch (const LibraryError&) {
      // Existing records can still be read; if tuning needs NVRTC, it raises the error.
      return "";
    }
  };
  return {user_records(),
          gpu_of(device),
          [](const KernelSpec& spec) { return build(spec); },
          compiler,
          settings().rank.value_or(0),
          settings().tune_worker};
}

} // namespace sagebwd
