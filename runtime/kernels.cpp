//===- kernels.cpp - Turn a KernelSpec into machine code ------------------===//

#include "runtime/kernels.h"
#include "cache/at_fork.h"
#include "generator/choice.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "runtime/compile_kernel.h"
#include "runtime/generate.h"
#include "runtime/kernel_builder.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/prebuild_command.h"
#include "runtime/settings.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace sagebwd {

namespace {

/// The version of the key's format and of the promises of an entry. Raise the number if either
/// changes its meaning.
constexpr const char* kSchema = "sagebwd kernel 2";

std::string joined_options(const KernelSource& source) {
  std::vector<std::string> options = Nvrtc::options();
  options.insert(options.end(), source.options.begin(), source.options.end());
  return llvm::join(options, " ");
}

pid_t counting_process = 0;

/// Prints one line of cache counters, for SAGEBWD_STATS=1. A forked child has a copy of its
/// parent's counters and prints nothing.
void print_counters() {
  if (::getpid() == counting_process)
    std::fprintf(stderr, "sagebwd: %s\n", to_string(user_store().counters()).c_str());
}

/// The builder is never destroyed, because threads may still build while the process ends.
KernelBuilder& builder() {
  static constinit Single<KernelBuilder> builder;
  return builder.get([] {
    KernelBuilder::Policy policy = KernelBuilder::Policy::of(settings());
    policy.announce_after = std::chrono::seconds{5};
    return new KernelBuilder(user_store(), generate, compile_with_nvrtc, std::move(policy));
  });
}

} // namespace

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
  fields.emplace_back("options", joined_options(source));
  fields.emplace_back("source", sha256_hex(source.text));
  fields.emplace_back("arch", spec.arch.name);
  return make_key(std::move(fields));
}

bool is_current(const CacheKey& key, const Settings& settings) {
  try {
    const auto text_of = [&](const std::string& label) { return key[label]; };
    const KernelSpec kernel = read_labelled(text_of, find_arch(key["arch"]));
    return key_of(generate_with(settings, kernel), kernel).digest == key.digest;
  } catch (const SpecError&) {
    return false;
  }
}

void make_tables() {
  for (const KernelSpec& kernel : Operation(resolved({}), all_archs().front()).distinct_kernels())
    key_of(emit(kernel), kernel);
}

std::shared_ptr<const BuiltKernel> build(const KernelSpec& spec) { return builder().build(spec); }

std::vector<std::shared_ptr<const BuiltKernel>> build_all(const std::vector<KernelSpec>& specs) {
  return builder().build_all(specs);
}

void build_in_background(const std::vector<KernelSpec>& specs, size_t width) {
  if (specs.empty())
    return;
  KernelBuilder& made_here = builder(); // not while the process ends
  try {
    std::thread([&made_here, specs, width] {
      try {
        made_here.build_all(specs, width);
      } catch (...) {
      }
    }).detach();
  } catch (const std::system_error&) {
    // No thread can be made: the pass that needs the kernels builds them.
  }
}

OfflineError of_operation(const OfflineError& error, const std::vector<KernelSpec>& kernels,
                          const ResolvedSpec& spec) {
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
