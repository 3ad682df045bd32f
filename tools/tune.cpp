//===- tune.cpp - Find the fastest tiles for this GPU ----------------------===//
#include "cache/bounded_json.h"
#include "cache/whole_file.h"
#include "generator/choice.h"
#include "generator/operation.h"
#include "runtime/on_gpu.h"
#include "runtime/tuner/records.h"
#include "runtime/tuner/tuner.h"
#include "tools/command.h"
#include "tools/python_command.h"
#include "tools/spec_options.h"
#include "tools/tune_plans.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"

#include <mutex>
#include <optional>
#include <set>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// The median time of a tile; 0 if it was not timed.
double median_ms_of(const TuningRecord& record, const std::string& tile) {
  for (const TriedTile& tried : record.candidates)
    if (tried.tile == tile && tried.outcome == "timed")
      return tried.median_ms;
  return 0;
}

/// How many times faster than the default the tile is; 0 if it was not timed.
double speedup_of(const TuningRecord& record) {
  const double tuned = median_ms_of(record, record.tile);
  return tuned > 0 ? median_ms_of(record, record.default_tile) / tuned : 0;
}

json::Object row_of(const TuningRecord& record) {
  const auto kept = parse_bounded_json(serialize(record));
  return json::Object{{"kernel", record.key["kind"]},
                      {"gpu", record.key["gpu"]},
                      {"bucket", record.key["bucket"]},
                      {"head_dim", record.key["head_dim"]},
                      {"dtype", record.key["dtype"]},
                      {"causal", record.key["causal"]},
                      {"digest", record.key.digest},
                      {"tile", record.tile},
                      {"default_tile", record.default_tile},
                      {"default_ms", median_ms_of(record, record.default_tile)},
                      {"tuned_ms", median_ms_of(record, record.tile)},
                      {"speedup", speedup_of(record)},
                      {"compiler", record.compiler},
                      {"candidates", *kept->getAsObject()->get("candidates")}};
}

/// "1.234", or "-" for a tile that was not timed.
std::string ms_text(const TriedTile& tried, double ms) {
  return tried.outcome == "timed" ? format("%.4f", ms) : "-";
}

/// The first line; compilers print many.
std::string brief(const std::string& text) {
  constexpr size_t kLongest = 100;
  std::string line = text.substr(0, text.find('\n'));
  if (line.size() > kLongest)
    line.replace(kLongest - 3, line.npos, "...");
  return line;
}

void print_tables(const std::vector<Tuned>& kernels, double seconds, bool kept) {
  for (const Tuned& kernel : kernels) {
    const TuningRecord& record = kernel.record;
    const double by_default = median_ms_of(record, record.default_tile);
    printf("%s, %s, on %s%s\n", record.key["kind"].c_str(), record.key["bucket"].c_str(),
           record.key["gpu"].c_str(), kernel.fresh ? "" : " (tuned before; --force tunes again)");
    Table table;
    for (const TriedTile& tried : record.candidates)
      table.add({{"", "won", tried.tile == record.tile ? "*" : ""},
                 {"", "tile", tried.tile},
                 {"", "outcome", tried.outcome},
                 {"", "median ms", ms_text(tried, tried.median_ms)},
                 {"", "MAD", ms_text(tried, tried.mad_ms)},
                 {"", "vs default",
                  tried.outcome == "timed" && tried.median_ms > 0
                      ? format("%.3f", by_default / tried.median_ms)
                      : "-"},
                 {"", "why", brief(tried.detail)}});
    table.print();
    printf("\n");
  }
  printf("%s in %.1f s, %s; * wins, the first is the default\n",
         counted(kernels.size(), "kernel").c_str(), seconds,
         kept ? ("kept in " + user_records().place()).c_str() : "not all kept");
}

/// As to_string() prints the spec, without its booleans.
std::string spec_of(const CacheKey& key) {
  std::string line;
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T&) {
    const std::string text = key[std::string(label.name)];
    if (!std::is_same_v<T, bool> && !text.empty())
      line += std::string(label.mark) + text;
  });
  return line;
}

std::vector<TuningRecord> all_records() {
  std::vector<std::string> problems;
  std::vector<TuningRecord> records = user_records().all(&problems);
  for (const std::string& problem : problems)
    complain("tune", problem);
  return records;
}

class Tune : public Command {
public:
  Tune()
      : Command("tune", "find the fastest tiles for this GPU",
                "Times every promising tile of the operation's three attention kernels, in a\n"
                "process of its own. A tile replaces the default only if it is clearly faster\n"
                "and gives the same bits (with --no-deterministic it may give others). The\n"
                "winner is kept as a tuning record, which calls of such sizes use from then on.\n"
                "Where one kernel forms all gradients, only the forward is tuned.\n"
                "SAGEBWD_TUNE=off|use|tune|frozen says whether records are used (default: use).\n"
                "With --compare-precisions it compares the speed and errors of the precisions\n"
                "instead, each with one kernel for all gradients and with two where both exist.\n"
                "With --lengths it tunes for each of these lengths, and then measures from which\n"
                "length on PyTorch's own attention is slower: crossover_tokens() and\n"
                "min_tokens='auto' of the Python package use this from then on. By default calls\n"
                "have 16 heads then, and as many sequences as make 32768 tokens. This needs\n"
                "PyTorch: it is 'python -m sagebwd tune' in the Python that lies beside this\n"
                "program, or else in the one on the PATH.\n"
                "\n"
                "examples:\n"
                "  sagebwd tune --head-dim 128 --seq-len 8192\n"
                "  sagebwd tune --head-dim 64 --causal top-left --batch 4 --heads 16 --json\n"
                "  sagebwd tune --kernel forward --tile 'mma 64x128 w4 s1 b2' --force\n"
                "  sagebwd tune --compare-precisions --seq-len 8192\n"
                "  sagebwd tune --lengths 512,1024,2048,4096,8192 --causal top-left\n"
                "  sagebwd tune --list\n"
                "  sagebwd tune --export h200.json\n"
                "  sagebwd tune --import h200.json\n") {
    spec_.declare(options, /*lists=*/false);
    problem_.declare(options);
    options.integer("gpu", device_, 0, 1023, "the GPU, numbered from 0");
    options.list("kernel", "NAME,..", kernels_, "kernels: forward, backward_dq, backward_dkv");
    options.offer(kernels_);
    options.list("tile", "TILE,..", tiles_, "let only these tiles compete with the default");
    options.integer("rounds", rounds_, tuner::kFewestRounds, 1000, "most timings per tile");
    options.flag("force", force_, "tune again even if there is a record");
    options.flag("compare-precisions", plans_,
                 "compare the precisions on this GPU; nothing is kept");
    options.also("plans", "compare-precisions");
    options.list("lengths", "N,..", lengths_,
                 "tune for these lengths, and measure from which on PyTorch is slower");
    options.flag("list", list_, "list the records of this machine");
    options.text("export", "FILE", export_, "write the records of this machine into a file");
    options.text("import", "FILE", import_, "add the records of a file");
    options.flag("overwrite", overwrite_, "with --import: replace records of this machine");
  }

  ExitCode run() override {
    if (list_ + !export_.empty() + !import_.empty() + plans_ + !lengths_.empty() > 1)
      throw UsageError("--compare-precisions, --lengths, --list, --export and --import exclude "
                       "each other: give one of them");
    for (const char* other : {"precision", "kernel", "tile", "force"})
      if (plans_ && options.given(other))
        throw UsageError("--" + std::string(other) +
                         " is for tuning; --compare-precisions compares all precisions as they "
                         "are: leave one of them out");
    if (overwrite_ && import_.empty())
      throw UsageError("--overwrite belongs to --import");
    for (const std::string action : {"list", "export", "import"})
      for (const std::string& name : options.given()) // the caller expects them to have an effect
        if (options.given(action) && name != action && name != "json" && name != "overwrite")
          throw UsageError("--" + name + " is for tuning, which --" + action +
                           " does not do: leave one of them out");
    if (plans_)
      return compare_plans_here();
    if (!lengths_.empty())
      tune_lengths();
    if (list_)
      return list_records();
    if (!export_.empty())
      return export_records();
    if (!import_.empty())
      return import_records();
    return tune_here();
  }

private:
  TuneRequest request() const {
    TuneRequest request;
    request.spec = spec_.one(options);
    request.problem = problem_.problem();
    request.device = device_;
    request.kernels.clear();
    for (const std::string& name : kernels_)
      request.kernels.push_back(parse_tiled_kernel(name));
    for (const std::string& tile : tiles_)
      request.only.push_back(parse_tile(tile));
    request.force = force_;
    request.limits.rounds = rounds_;
    return request;
  }

  ExitCode tune_here() {
    TuneRequest request = this->request();
    const ResolvedSpec spec = resolved(request.spec);
    check(spec, request.problem); // wrong use is reported without a GPU, too
    require_gpu(device_, "this command");
    require_packs();
    const auto start = std::chrono::steady_clock::now();
    std::vector<Tuned> kernels;
    {
      std::mutex mutex;
      std::optional<Progress> bar; // for one stage of one kernel
      std::string stage;
      request.progress = [&](const TuneProgress& p) {
        std::lock_guard lock(mutex);
        std::string now = std::string(to_string(p.kernel)) + ": " + p.stage;
        if (std::exchange(stage, now) != now)
          bar.emplace(now, static_cast<size_t>(p.total));
        bar->advance(p.tile);
      };
      kernels = tune(request);
    }
    const double seconds = milliseconds_since(start) / 1000;
    const auto launched =
        Operation(spec, gpu_of(device_).arch).for_call(request.problem).tunable_kernels();
    std::vector<std::string> left_out;
    for (KernelKind kind : request.kernels)
      if (!llvm::is_contained(launched, kind))
        left_out.emplace_back(to_string(kind));
    json::Array rows;
    size_t lost = 0;
    for (const Tuned& kernel : kernels) {
      json::Object row = row_of(kernel.record);
      row["fresh"] = kernel.fresh;
      row["kept"] = kernel.kept;
      rows.push_back(std::move(row));
      lost += !kernel.kept;
    }
    if (lost > 0)
      failures.push_back(counted(lost, "record") + " could not be kept; no later run will know " +
                         (lost == 1 ? "it" : "them"));
    return finish(json::Object{{"problem", json_of(request.problem)},
                               {"spec", to_string(request.spec)},
                               {"seconds", seconds},
                               {"kernels", std::move(rows)},
                               {"left_out", json::Array(left_out)}},
                  [&] {
                    print_tables(kernels, seconds, lost == 0);
                    if (!left_out.empty())
                      printf("%s left out: the backward is one kernel here, which has its default "
                             "tile; --compare-precisions compares it with a split backward\n",
                             llvm::join(left_out, ", ").c_str());
                  });
  }

  ExitCode compare_plans_here() const {
    PlanRequest request;
    request.spec = spec_.one(options);
    request.problem = problem_.problem();
    request.device = device_;
    request.rounds = rounds_;
    check(resolved(request.spec), request.problem);
    require_gpu(device_, "this command");
    require_packs();
    std::optional<Progress> bar;
    request.progress = [&](const std::string& what, int, int total) {
      if (!bar)
        bar.emplace("comparing", static_cast<size_t>(total));
      bar->advance(what);
    };
    std::vector<std::string> left_out;
    const std::vector<PlanFigures> plans = compare_plans(request, left_out);
    bar.reset();
    const Table table = table_of(plans);
    return finish(json::Object{{"problem", json_of(request.problem)},
                               {"spec", to_string(request.spec)},
                               {"gpu", driver::device_info(device_).name},
                               {"precisions", table.json()},
                               {"left_out", json::Array(left_out)}},
                  [&] {
                    table.print();
                    printf("%s\n", legend_of(plans, request.problem).c_str());
                    for (const std::string& line : left_out)
                      printf("left out: %s\n", line.c_str());
                  });
  }

  /// Python checks the numbers, and measures.
  [[noreturn]] void tune_lengths() const {
    static const std::set<std::string> kTheirs = {
        "lengths", "batch",  "heads",     "heads-kv", "head-dim", "dtype", "causal",
        "dp-sums", "rounds", "precision", "force",    "gpu",      "json"};
    for (const std::string& name : options.given())
      if (!kTheirs.count(name))
        throw UsageError("--" + name +
                         " is not for --lengths, whose calls differ in batch, heads, "
                         "head-dim, dtype, causal, precision and dp-sums alone");
    become_python("tune", arguments);
  }

  ExitCode list_records() const {
    const std::vector<TuningRecord> records = all_records();
    const std::string place = user_records().place();
    json::Array rows;
    Table table;
    for (const TuningRecord& record : records) {
      const CacheKey& key = record.key;
      const double speedup = speedup_of(record);
      table.add({{"", "kernel", key["kind"]},
                 {"", "spec", spec_of(key)},
                 {"", "bucket", key["bucket"]},
                 {"", "GPU", key["gpu"]},
                 {"", "tile", record.tile},
                 {"", "default", record.default_tile},
                 {"", "speed-up", speedup > 0 ? format("%.3f", speedup) : "-"}});
      rows.push_back(row_of(record));
    }
    const std::vector<Arch> archs = has_gpu() ? parse_archs({"native"}) : all_archs();
    json::Object origins;
    for (const Arch& arch : archs)
      origins[llvm::StringRef(arch.name)] = origin_of_default_tiles(arch);
    return finish(
        json::Object{
            {"place", place}, {"records", std::move(rows)}, {"default_tiles", std::move(origins)}},
        [&] {
          table.print();
          printf("%s in %s\n", counted(records.size(), "tuning record").c_str(), place.c_str());
          for (const Arch& arch : archs)
            printf("%s\n", origin_in_words(arch).c_str());
        });
  }

  ExitCode export_records() const {
    const std::vector<TuningRecord> records = all_records();
    const std::string text = user_records().exported(records);
    if (std::string why = write_output(export_, {&text}); !why.empty())
      throw std::runtime_error(why);
    return finish(json::Object{{"file", export_}, {"exported", records.size()}}, [&] {
      printf("%s written to %s\n", counted(records.size(), "tuning record").c_str(),
             export_.c_str());
    });
  }

  ExitCode import_records() const {
    std::string why;
    const auto records = parse_records(read_input(import_), &why);
    Records::Merged merged;
    if (records)
      try {
        merged = user_records().merge(*records, overwrite_);
      } catch (const SpecError& error) { // the file is wrong, not the command line
        why = error.what();
      }
    if (!records || !why.empty())
      throw std::runtime_error(import_ + " is not imported, nothing has changed: " + why);
    return finish(json::Object{{"file", import_},
                               {"added", merged.added},
                               {"kept", merged.kept},
                               {"replaced", merged.replaced}},
                  [&] {
                    printf("%s added, %zu kept as they were, %zu replaced in %s\n",
                           counted(merged.added, "tuning record").c_str(), merged.kept,
                           merged.replaced, user_records().place().c_str());
                  });
  }

  SpecOptions spec_;
  ProblemOptions problem_{{1, 8, 0, 8192, 0}}; // as in Python
  std::vector<std::string> kernels_{"forward", "backward_dq", "backward_dkv"}, tiles_, lengths_;
  bool force_ = false, plans_ = false, list_ = false, overwrite_ = false;
  int device_ = 0, rounds_ = 15;
  std::string export_, import_;
};

} // namespace

std::unique_ptr<Command> make_tune() { return std::make_unique<Tune>(); }

} // namespace sagebwd::tools
