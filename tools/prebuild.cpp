//===- prebuild.cpp - Many operations' kernels in one pack -----------------===//
#include "runtime/prebuild.h"
#include "cache/posix.h"
#include "cache/whole_file.h"
#include "runtime/driver/driver.h"
#include "runtime/nvrtc/nvrtc.h"
#include "tools/command.h"
#include "tools/operation_options.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

namespace sagebwd::tools {

namespace {

using driver::version_text;
namespace json = llvm::json;

class Prebuild : public Command {
public:
  Prebuild()
      : Command("prebuild", "compile the kernels of many operations into one pack",
                "Writes every kernel that the operations need, forward and backward, into one\n"
                "file, for machines that do not compile. It needs NVRTC, but no GPU. Lists are\n"
                "combined: every architecture with every head dimension, and so on. A run that\n"
                "was killed continues where it stopped. The same operations give the same bytes.\n"
                "Kernels that an architecture cannot have, or that NVRTC is too old for, are\n"
                "listed, the others are in the pack, and the exit code is 1. If one does not\n"
                "compile, there is no pack, and the next run continues. Use the file with\n"
                "SAGEBWD_CACHE_PACKS=FILE, and with SAGEBWD_OFFLINE=1 where nothing may be\n"
                "compiled.\n"
                "\n"
                "'build' takes the same options and fills the cache of this machine. By default\n"
                "'build' builds one operation, and 'prebuild' what a cluster is likely to need:\n"
                "two head dimensions, both dtypes, with and without a causal mask. 'prebuild' is\n"
                "for other machines, so without a GPU it has no default for --arch.\n"
                "\n"
                "examples:\n"
                "  sagebwd prebuild --arch sm_80,sm_86,sm_89,sm_90a,sm_120 --head-dim 64,128 \\\n"
                "      --dtype bf16,fp16 --out fleet.pack\n"
                "  sagebwd prebuild --specs specs.yaml --out fleet.pack\n"
                "  sagebwd prebuild --arch sm_90a --records tuned.json --out h200.pack\n"
                "  sagebwd prebuild --arch sm_90a --packed --out packed.pack\n"
                "  sagebwd prebuild --arch sm_90a --dry-run\n"
                "\n"
                "a list of specs, in YAML or JSON, in which only arch is required:\n"
                "  - arch: [sm_80, sm_90a]\n"
                "    head_dim: [64, 128]\n"
                "    dtype: bf16\n"
                "    causal: [none, top-left]\n"
                "  - {arch: sm_120, head_dim: 64, granularity: block, pass: forward}\n"
                "  - {arch: all, packed: [no, yes]}\n"),
        operations_(usual_words(), /*without_gpu=*/"") {
    operations_.declare(options);
    options.list("records", "FILE,..", record_files_,
                 "add these tuning records ('sagebwd tune --export') and their tiles");
    options.text("out", "FILE", out_, "the pack to write");
    options.flag("dry-run", dry_run_, "list what would be built");
  }

  ExitCode run() override {
    const std::vector<WantedOperation> operations = operations_.wanted(options, failures);
    const std::vector<TuningRecord> given = records();
    PrebuildRequest request;
    request.output = out_;
    request.kernels = kernels_of(operations); // an impossible request is wrong use
    try {
      request.records = records_of(operations, given);
      request.kernels = kernels_of(operations, given);
    } catch (const SpecError& error) { // the file is wrong, not the command line
      throw std::runtime_error(error.what());
    }
    if (!given.empty() && request.records.empty())
      throw UsageError("none of the " + std::to_string(given.size()) +
                       " tuning records is of the operations asked for; leave --records out, or "
                       "name what was tuned");
    if (const std::string why = out_.empty() ? "" : reason_not_to_write(out_); !why.empty())
      throw std::runtime_error(why);
    if (dry_run_)
      return list_kernels(*this, request.kernels, failures);
    if (out_.empty())
      throw UsageError("name the pack with --out FILE, or take --dry-run");

    leave_out_what_nvrtc_lacks(request.kernels);
    const auto start = std::chrono::steady_clock::now();
    std::optional<Progress> progress(std::in_place, "prebuilding", request.kernels.size());
    request.progress = [&](const BuiltKernel& kernel, size_t, size_t) {
      progress->advance(kernel.entry.arch + " " + kernel.entry.kernel_name);
    };
    say_when_interrupted(name, "; run the same command to continue");
    const PrebuildResult result = prebuild(request);
    progress.reset();
    return report(result, given.size() - request.records.size(), milliseconds_since(start) / 1e3);
  }

private:
  /// Leaves out what NVRTC is too old for. Raises LibraryError where that is everything.
  void leave_out_what_nvrtc_lacks(std::vector<KernelSpec>& kernels) {
    std::erase_if(kernels, [&](const KernelSpec& kernel) {
      const std::string why = Nvrtc::instance().why_not(kernel.arch.name);
      if (!why.empty())
        note(why);
      return !why.empty();
    });
    if (kernels.empty())
      throw LibraryError(llvm::join(std::exchange(failures, {}), "\n"));
  }

  void note(const std::string& failure) {
    if (!llvm::is_contained(failures, failure))
      failures.push_back(failure);
  }

  std::vector<TuningRecord> records() const {
    std::vector<TuningRecord> records;
    for (const std::string& path : record_files_) {
      std::string why;
      auto more = parse_records(read_input(path), &why);
      if (!more)
        throw std::runtime_error(path + " holds no tuning records: " + why);
      records.insert(records.end(), more->begin(), more->end());
    }
    return records;
  }

  ExitCode report(const PrebuildResult&, size_t records_left_out, double seconds) const;

  OperationOptions operations_;
  std::vector<std::string> record_files_;
  std::string out_;
  bool dry_run_ = false;
};

/// Sums over the kernels of one architecture, or over all.
struct Summary {
  size_t kernels = 0, compiled = 0;
  uint64_t cubin_bytes = 0;
  int lowest_driver = 0;
  double compile_s = 0;

  void add(const BuiltKernel& kernel) {
    ++kernels;
    compiled += !kernel.cached;
    cubin_bytes += kernel.entry.cubin.size();
    lowest_driver = std::max(lowest_driver, kernel.entry.lowest_driver);
    compile_s += kernel.cached ? 0 : kernel.entry.compile_ms / 1e3;
  }
};

/// Says what to do with a pack in a shell.
std::string how_to_use(const std::string& pack) {
  return pack.find(':') == std::string::npos
             ? "Use it with SAGEBWD_CACHE_PACKS=" + shell_quoted(pack)
             : "Copy it to a path without a colon, because colons separate paths in "
               "SAGEBWD_CACHE_PACKS";
}

ExitCode Prebuild::report(const PrebuildResult& result, size_t records_left_out,
                          double seconds) const {
  std::map<std::string, Summary> archs;
  Summary all;
  for (const auto& kernel : result.kernels) {
    archs[kernel->entry.arch].add(*kernel);
    all.add(*kernel);
  }
  Table table;
  for (const auto& [arch, part] : archs)
    table.add(
        {{"arch", "arch", arch},
         {"kernels", "kernels", part.kernels},
         {"cubin_bytes", "KiB", part.cubin_bytes, std::to_string(part.cubin_bytes >> 10)},
         {"lowest_driver", "lowest driver", part.lowest_driver, version_text(part.lowest_driver)},
         number("compile_s", "compile s", 1, part.compile_s)});
  return finish(
      json::Object{{"out", out_},
                   {"bytes", result.pack_bytes},
                   {"kernels", all.kernels},
                   {"compiled", all.compiled},
                   {"resumed", all.kernels - all.compiled},
                   {"records", result.records},
                   {"records_left_out", records_left_out},
                   {"compiler", archs.empty() ? "" : result.kernels.front()->entry.compiler},
                   {"lowest_driver", all.lowest_driver},
                   {"threads", result.threads},
                   {"compile_s", all.compile_s},
                   {"seconds", seconds},
                   {"failures", json::Array(failures)},
                   {"archs", table.json()}},
      [&] {
        table.print();
        printf("%s: %s, %s, %.1f MiB, in %.1f s on %s", out_.c_str(),
               counted(all.kernels, "kernel").c_str(),
               counted(result.records, "tuning record").c_str(),
               static_cast<double>(result.pack_bytes) / (1 << 20), seconds,
               counted(result.threads, "thread").c_str());
        if (all.compiled < all.kernels)
          printf("; %zu were there from an interrupted run", all.kernels - all.compiled);
        if (records_left_out)
          printf("; left out, because they are of other operations: %s",
                 counted(records_left_out, "tuning record").c_str());
        printf("\nIt loads on drivers of CUDA %s or newer. %s\n",
               version_text(all.lowest_driver).c_str(),
               how_to_use(std::filesystem::absolute(out_)).c_str());
      });
}

} // namespace

std::unique_ptr<Command> make_prebuild() { return std::make_unique<Prebuild>(); }

} // namespace sagebwd::tools
