//===- build.cpp - Compile the kernels of operations into the cache --------===//
#include "runtime/generate.h"
#include "runtime/kernel_builder.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/settings.h"
#include "tools/command.h"
#include "tools/console.h"
#include "tools/spec_options.h"

#include <algorithm>
#include <set>

namespace sagebwd::tools {

namespace {

using Built = std::shared_ptr<const BuiltKernel>;
using Clock = std::chrono::steady_clock;

class Build : public Command {
public:
  Build()
      : Command(
            "build", "compile every kernel of an operation into the cache",
            "Compiles forward and backward for each architecture and spec, or takes them from\n"
            "the cache. Needs no GPU. 'ms' is the time this process spent compiling. What\n"
            "does not compile is listed, and the exit code is 1.\n"
            "\n"
            "examples:\n"
            "  sagebwd build --arch sm_90a --head-dim 128 --dtype bf16 --causal none --json\n"
            "  sagebwd build --arch sm_80,sm_86,sm_120 --head-dim 64,128\n"
            "  SAGEBWD_CACHE_DIR=/shared/cubins sagebwd build --arch sm_90a --causal top-left\n") {
    options.list("arch", "ARCH,..", archs_, "architectures");
    options.flag("recompile", recompile_,
                 "what another version of NVRTC compiled is compiled anew");
    spec_.declare(options, /*lists=*/true);
  }

  ExitCode run() override {
    Clock::time_point start = Clock::now();
    std::vector<Operation> operations = wanted();
    KernelBuilder builder(user_store(), generate, compile_with_nvrtc, policy());
    Progress progress("building", operations.size());
    std::vector<Built> kernels;
    std::vector<std::string> failures;
    for (const auto& [spec, operation] : operations) {
      const std::string what = std::string(operation.front().arch.name) + " " + to_string(*spec);
      try {
        for (Built& kernel : builder.build_all(operation))
          kernels.push_back(std::move(kernel));
      } catch (const CompileError& error) { // the others are still wanted
        failures.push_back(what + ": " + error.what());
      } catch (const OfflineError& error) {
        failures.push_back(what + ": " + of_operation(error, operation, spec).what());
      }
      progress.advance(what);
    }
    const CacheStore& store = user_store();
    if (!store.disabled_reason().empty() && store.counters().compiles > 0)
      failures.push_back("nothing is kept on disk: " + store.disabled_reason());
    else if (const uint64_t lost = store.counters().publish_failures)
      failures.push_back(std::to_string(lost) + " kernels could not be kept in " +
                         store.directory() + ": they are compiled, but not there for others");
    double total_ms = milliseconds_since(start);
    json ? print_as_json(kernels, failures, total_ms) : print_as_table(kernels, total_ms);
    for (const std::string& failure : failures)
      fprintf(stderr, "sagebwd build: %s\n", failure.c_str());
    return failures.empty() ? kDone : kFailed;
  }

private:
  KernelBuilder::Policy policy() const;
  /// Of one architecture and spec; a kernel that several specs share is in the first.
  struct Operation {
    ResolvedSpec spec;
    std::vector<KernelSpec> kernels;
  };
  std::vector<Operation> wanted() const;
  void print_as_json(const std::vector<Built>&, const std::vector<std::string>& failures,
                     double total_ms) const;
  void print_as_table(const std::vector<Built>&, double total_ms) const;

  SpecOptions spec_;
  std::vector<std::string> archs_{"sm_80"};
  bool recompile_ = false;
};

KernelBuilder::Policy Build::policy() const {
  KernelBuilder::Policy policy = KernelBuilder::Policy::of(settings());
  if (recompile_ && policy.offline)
    throw UsageError("--recompile compiles, which SAGEBWD_OFFLINE=1 forbids; unset one of them");
  if (recompile_)
    policy.accept = [](const CacheEntry& entry) {
      return entry.compiler == Nvrtc::instance().identity();
    };
  return policy;
}

/// What this process spent on it; the entry remembers what its first compile took.
double spent_ms(const BuiltKernel& kernel) { return kernel.cached ? 0 : kernel.entry.compile_ms; }

std::vector<Build::Operation> Build::wanted() const {
  std::vector<Operation> operations;
  std::set<std::string> seen;
  for (const Arch& arch : parse_archs(archs_))
    for (const AttentionSpec& spec : spec_.all(options)) {
      const ResolvedSpec full = resolved(spec, arch);
      std::vector<KernelSpec> kernels;
      for (const KernelSpec& kernel : distinct_kernels(full, arch))
        if (seen.insert(std::string(arch.name) + " " + kernel_name(kernel)).second)
          kernels.push_back(kernel);
      if (!kernels.empty())
        operations.push_back({full, std::move(kernels)});
    }
  return operations;
}

void Build::print_as_json(const std::vector<Built>& kernels,
                          const std::vector<std::string>& failures, double total_ms) const {
  llvm::json::Array array;
  for (const Built& kernel : kernels)
    array.push_back(llvm::json::Object{{"name", kernel->entry.kernel_name},
                                       {"arch", kernel->entry.arch},
                                       {"pass", std::string(to_string(kernel->spec.pass))},
                                       {"cached", kernel->cached},
                                       {"compile_ms", spent_ms(*kernel)},
                                       {"registers", kernel->entry.registers},
                                       {"spill_bytes", kernel->entry.spill_bytes},
                                       {"shared_bytes", kernel->entry.shared_bytes}});
  llvm::json::Object counters;
  for (const auto& [name, value] : listed(user_store().counters()))
    counters[name] = static_cast<int64_t>(value);
  print_json(llvm::json::Object{{"kernels", std::move(array)},
                                {"counters", std::move(counters)},
                                {"failures", llvm::json::Array(failures)},
                                {"total_ms", total_ms}});
}

void Build::print_as_table(const std::vector<Built>& kernels, double total_ms) const {
  Table table({"kernel", "arch", "pass", "ms", "registers", "spills", "shared", "cached"});
  size_t cached = 0;
  for (const Built& kernel : kernels) {
    cached += kernel->cached;
    table.add({kernel->entry.kernel_name, kernel->entry.arch,
               std::string(to_string(kernel->spec.pass)), format("%.0f", spent_ms(*kernel)),
               std::to_string(kernel->entry.registers), std::to_string(kernel->entry.spill_bytes),
               std::to_string(kernel->entry.shared_bytes), kernel->cached ? "yes" : "no"});
  }
  table.print();
  printf("%zu kernels, %zu from the cache, %.0f ms in all\n", kernels.size(), cached, total_ms);
  const CacheCounters& c = user_store().counters();
  auto number = [](const std::atomic<uint64_t>& value) {
    return static_cast<unsigned long long>(value);
  };
  printf("directory %llu hits, packs %llu, waits %llu, compiles %llu (%.1f s of all threads)\n",
         number(c.hits), number(c.pack_hits), number(c.waits), number(c.compiles),
         static_cast<double>(c.compile_us) / 1e6);
}

} // namespace

std::unique_ptr<Command> make_build() { return std::make_unique<Build>(); }

} // namespace sagebwd::tools
