//===- kernels.cpp - From a KernelSpec to machine code ---------------------===//

#include "runtime/kernels.h"
#include "cache/at_fork.h"
#include "generator/space.h"
#include "runtime/driver/driver.h"
#include "runtime/generate.h"
#include "runtime/kernel_builder.h"
#include "runtime/nvrtc/in_use.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/prebuild_command.h"
#include "runtime/settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <unistd.h>

namespace sagebwd {

namespace {

/// Of the key and of what an entry promises. Raise it when either changes its meaning.
constexpr const char* kSchema = "sagebwd kernel 2";

std::string joined_options(const KernelSource& source) {
  std::string text;
  for (const std::string& option : Nvrtc::options())
    text += (text.empty() ? "" : " ") + option;
  for (const std::string& option : source.options)
    text += " " + option;
  return text;
}

/// Bytes of spill stores and loads a thread may have. Kernels are laid out to have none with the
/// NVRTC this is tested with; another version's ptxas may need a few, which costs too little to
/// refuse the kernel for. Every listing shows them.
constexpr int kTolerableSpillBytes = 128;

pid_t counting_process = 0;

/// One line of what the cache did, for SAGEBWD_STATS=1. A forked child has its parent's counters.
void print_counters() {
  if (::getpid() == counting_process)
    std::fprintf(stderr, "sagebwd: %s\n", to_string(user_store().counters()).c_str());
}

/// Never destroyed: threads may still build while the process ends.
KernelBuilder& builder() {
  static constinit Single<KernelBuilder> builder;
  return builder.get([] {
    KernelBuilder::Policy policy = KernelBuilder::Policy::of(settings());
    policy.announce_after = std::chrono::seconds{5};
    return new KernelBuilder(user_store(), generate, compile_with_nvrtc, std::move(policy));
  });
}

} // namespace

KernelBuilder::Policy KernelBuilder::Policy::of(const Settings& settings) {
  Policy policy;
  policy.offline = settings.offline;
  policy.check_compiler = nvrtc::raise_if_unusable;
  if (!policy.offline)
    policy.accept = [recompile = settings.recompile](const CacheEntry& entry) {
      // A neighbour with a newer driver may have compiled it. Where nothing is run, any will do.
      const int driver = driver::opened_driver_version();
      return (driver == 0 || entry.lowest_driver <= driver) &&
             (!recompile || entry.compiler == Nvrtc::instance().identity());
    };
  return policy;
}

KernelBuilder::Compiled compile_with_nvrtc(const KernelSource& source, const KernelSpec& spec) {
  // What waits take more registers for may spill.
  return compile_kernel(source, spec, settings().allow_spills || settings().debug_waits);
}

KernelBuilder::Compiled compile_kernel(const KernelSource& source, const KernelSpec& spec,
                                       bool allow_spills) {
  Nvrtc& nvrtc = Nvrtc::instance();
  Compilation compilation =
      nvrtc.compile(source.name, source.text, spec.arch.name, false, source.options);
  std::vector<std::string> warnings = compile_warnings(compilation.log);
  if (compilation.spill_bytes <= kTolerableSpillBytes)
    std::erase_if(warnings,
                  [](const std::string& w) { return w.find("C75") == std::string::npos; });
  if (!warnings.empty() && !allow_spills) {
    std::string what = source.name + " compiles for " + std::string(spec.arch.name) +
                       ", but is not usable: a defect of its tile configuration (" +
                       to_string(spec.tile) +
                       "). Please report it with this text and the output of 'sagebwd doctor', as "
                       "CONTRIBUTING.md says. SAGEBWD_ALLOW_SPILLS=1 runs it all the same.";
    for (const std::string& warning : warnings)
      what += "\n  " + warning;
    throw CompileError(what, compilation.log, number_lines(source.text));
  }

  CacheEntry entry;
  entry.kernel_name = source.name;
  entry.arch = spec.arch.name;
  entry.compiler = nvrtc.identity();
  entry.lowest_driver = std::max(1000 * nvrtc.version_major(), spec.arch.first_cuda);
  entry.registers = compilation.registers;
  entry.spill_bytes = compilation.spill_bytes;
  entry.shared_bytes = compilation.static_shared_bytes + source.shared_bytes;
  entry.compile_ms = compilation.compile_ms;
  entry.cubin = std::move(compilation.cubin);
  return {std::move(entry), /*keep=*/warnings.empty()};
}

CacheStore& user_store() {
  static constinit Single<CacheStore> store;
  return store.get([] {
    auto* made = new CacheStore(settings().store_options());
    counting_process = ::getpid();
    if (settings().stats)
      std::atexit(print_counters);
    return made;
  });
}

CacheKey key_of(const KernelSource& source, const KernelSpec& spec) {
  std::vector<std::pair<std::string, std::string>> fields = labelled(spec);
  fields.emplace_back("schema", kSchema);
  fields.emplace_back("source", sha256_hex(source.text));
  fields.emplace_back("options", joined_options(source));
  fields.emplace_back("arch", spec.arch.name);
  return make_key(std::move(fields));
}

void make_tables() {
  for (const KernelSpec& kernel : distinct_kernels(resolved({}), all_archs().front()))
    key_of(emit(kernel), kernel);
}

std::shared_ptr<const BuiltKernel> build(const KernelSpec& spec) { return builder().build(spec); }

std::vector<std::shared_ptr<const BuiltKernel>> build_all(const std::vector<KernelSpec>& specs) {
  return builder().build_all(specs);
}

OfflineError of_operation(const OfflineError& error, const std::vector<KernelSpec>& kernels,
                          const ResolvedSpec& spec) {
  // A kernel's own spec is narrower than the operation's.
  const bool tuned = !std::all_of(kernels.begin(), kernels.end(), has_default_tile);
  return OfflineError(error.missing, prebuild_command(spec, kernels.front().arch, tuned));
}

std::vector<std::shared_ptr<const BuiltKernel>>
build_operation(const std::vector<KernelSpec>& kernels, const ResolvedSpec& spec) {
  try {
    return build_all(kernels);
  } catch (const OfflineError& error) {
    throw of_operation(error, kernels, spec);
  }
}

} // namespace sagebwd
