//===- build.cpp - Compile the kernels of operations into the cache --------===//
#include "runtime/compile_kernel.h"
#include "runtime/compile_width.h"
#include "runtime/generate.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/parallel_for.h"
#include "runtime/settings.h"
#include "tools/command.h"
#include "tools/operation_options.h"

#include <algorithm>
#include <set>

namespace sagebwd::tools {

namespace {

using Built = std::shared_ptr<const BuiltKernel>;
namespace json = llvm::json;

Table table_of(const std::vector<Built>& kernels) {
  Table table;
  for (const Built& kernel : kernels) {
    const CacheEntry& entry = kernel->entry;
    // The time that this process spent; the entry has that of the first compile.
    const double spent_ms = kernel->cached ? 0 : entry.compile_ms;
    table.add({{"name", "kernel", entry.kernel_name},
               {"arch", "arch", entry.arch},
               {"pass", "pass", std::string(to_string(kernel->spec.pass))},
               number("compile_ms", "ms", 0, spent_ms),
               {"registers", "registers", entry.registers},
               {"spill_bytes", "spills", entry.spill_bytes},
               {"shared_bytes", "shared", entry.shared_bytes},
               {"cached", "cached", kernel->cached}});
  }
  return table;
}

void print_summary(const std::vector<Built>& kernels, double total_ms) {
  const auto cached =
      std::count_if(kernels.begin(), kernels.end(), [](const Built& k) { return k->cached; });
  printf("%s, %td from the cache, %.0f ms in all\n", counted(kernels.size(), "kernel").c_str(),
         cached, total_ms);
  const CacheCounters& c = user_store().counters();
  printf("directory %zu hits, packs %zu, waits %zu, compiles %zu (%.1f s of all threads)\n",
         size_t{c.hits}, size_t{c.pack_hits}, size_t{c.waits}, size_t{c.compiles},
         static_cast<double>(c.compile_us) / 1e6);
}

class Build : public Command {
public:
  Build()
      : Command("build", "compile every kernel of an operation into the cache",
                "Compiles forward and backward for each architecture and spec, or takes them from\n"
                "the cache. It needs NVRTC, but no GPU. The column 'ms' is the time that this\n"
                "process spent compiling. Kernels that cannot be built are listed, the others are\n"
                "built, and the exit code is 1.\n"
                "\n"
                "'prebuild' takes the same options and writes a pack for other machines. It\n"
                "builds several head dimensions, dtypes and masks by default, and 'build' one.\n"
                "\n"
                "examples:\n"
                "  sagebwd build --arch sm_90a --head-dim 128 --dtype bf16 --causal none --json\n"
                "  sagebwd build --arch sm_80,sm_86,sm_120 --head-dim 64,128\n"
                "  sagebwd build --arch sm_89 --head-dim 256 --pass forward\n"
                "  SAGEBWD_CACHE_DIR=~/cubins sagebwd build --arch sm_90a --causal top-left\n"),
        operations_({}, /*without_gpu=*/"sm_80") {
    operations_.declare(options);
    options.flag("recompile", recompile_,
                 "compile kernels again that another version of NVRTC compiled");
    options.flag("dry-run", dry_run_, "list what would be built");
  }

  ExitCode run() override {
    const auto start = std::chrono::steady_clock::now();
    const std::vector<OperationKernels> operations = operations_.operations(options, failures);
    if (dry_run_)
      return list(operations);
    require_packs();
    KernelBuilder builder(user_store(), generate, compile_with_nvrtc, policy());
    std::vector<Built> kernels;
    {
      size_t wanted_kernels = 0;
      for (const OperationKernels& operation : operations)
        wanted_kernels += operation.kernels.size();
      Progress progress("building", wanted_kernels);
      std::set<std::string> refused; // the same for every operation
      for (const auto& [arch, spec, wanted] : operations) {
        const std::string what = std::string(arch.name) + " " + to_string(*spec);
        std::vector<Built> built(wanted.size());
        try {
          parallel_for(
              wanted.size(), compile_width(),
              [&](size_t i) { built[i] = builder.build(wanted[i]); },
              [&](size_t i) {
                progress.advance(built[i]->entry.arch + " " + built[i]->entry.kernel_name);
              });
          kernels.insert(kernels.end(), built.begin(), built.end());
        } catch (const CompileError& error) { // the other operations are still built
          failures.push_back(what + ": " + error.what());
        } catch (const LibraryError& error) { // NVRTC does not know the architecture, say
          Nvrtc::instance();                  // raises where there is none: that is all there is
          if (refused.insert(error.what()).second)
            failures.push_back(error.what());
        } catch (const OfflineError& error) {
          failures.push_back(what + ": " + of_operation(error, wanted, spec).what());
        }
      }
    }
    const CacheStore& store = user_store();
    const CacheCounters& c = store.counters();
    if (!store.disabled_reason().empty() && c.compiles > 0)
      failures.push_back("nothing is kept on disk: " + store.disabled_reason());
    else if (const uint64_t lost = c.publish_failures)
      failures.push_back(counted(lost, "kernel") + " could not be kept in " + store.directory() +
                         (lost == 1 ? ": it is" : ": they are") +
                         " compiled, but not there for others");
    const double total_ms = milliseconds_since(start);
    json::Object counters;
    for (const auto& [name, value] : listed(c))
      counters[name] = static_cast<int64_t>(value);
    const Table table = table_of(kernels);
    return finish(json::Object{{"kernels", table.json()},
                               {"counters", std::move(counters)},
                               {"failures", json::Array(failures)},
                               {"total_ms", total_ms}},
                  [&] {
                    table.print();
                    if (!kernels.empty())
                      print_summary(kernels, total_ms);
                  });
  }

private:
  ExitCode list(const std::vector<OperationKernels>& operations) const {
    std::vector<KernelSpec> kernels;
    for (const OperationKernels& operation : operations)
      kernels.insert(kernels.end(), operation.kernels.begin(), operation.kernels.end());
    return list_kernels(*this, kernels, failures);
  }
  KernelBuilder::Policy policy() const {
    KernelBuilder::Policy policy = KernelBuilder::Policy::of(settings());
    if (recompile_ && policy.offline)
      throw UsageError("--recompile compiles, which SAGEBWD_OFFLINE=1 forbids; unset one of them");
    if (recompile_)
      policy.accept = [](const CacheEntry& entry) {
        return entry.compiler == Nvrtc::instance().identity();
      };
    return policy;
  }

  OperationOptions operations_;
  bool recompile_ = false, dry_run_ = false;
};

} // namespace

std::unique_ptr<Command> make_build() { return std::make_unique<Build>(); }

} // namespace sagebwd::tools
