//===- kernel_builder.cpp - Find a kernel, or compile it ------------------===//

#include "runtime/kernel_builder.h"
#include "cache/inventory.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "runtime/compile_width.h"
#include "runtime/driver/driver.h"
#include "runtime/log.h"
#include "runtime/nvrtc/in_use.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/parallel_for.h"
#include "runtime/settings.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/ScopeExit.h"
#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <string_view>

namespace sagebwd {

size_t KernelSpecHash::operator()(const KernelSpec& spec) const {
  size_t hash = std::hash<std::string_view>()(spec.arch.name);
  const auto add = [&]<typename T>(const T& value) { // a collision only costs a comparison
    if constexpr (std::is_same_v<T, std::string>)
      hash = hash * 1000003 + std::hash<T>()(value);
    else
      hash = hash * 1000003 + static_cast<size_t>(value);
  };
  add(spec.kind);
  add(spec.pass);
  visit_fields(spec, [&](const Label&, const auto& value) { add(value); });
  return hash;
}

KernelBuilder::Policy KernelBuilder::Policy::of(const Settings& settings) {
  Policy policy;
  policy.offline = settings.offline;
  policy.check_compiler = nvrtc::raise_if_unusable;
  if (!policy.offline)
    policy.accept = [recompile = settings.recompile](const CacheEntry& entry) {
      // A neighbour with a newer driver may have compiled the entry. If no driver is open, nothing
      // is launched, and every entry is accepted.
      const int driver = driver::opened_driver_version();
      return (driver == 0 || entry.lowest_driver <= driver) &&
             (!recompile || entry.compiler == Nvrtc::instance().identity());
    };
  return policy;
}

namespace {

/// Waits for a kernel that another thread builds, and can be interrupted.
KernelBuilder::Built wait_for(const std::shared_future<KernelBuilder::Built>& kernel) {
  while (kernel.wait_for(std::chrono::milliseconds{50}) != std::future_status::ready)
    check_interrupt();
  return kernel.get();
}

/// Whether one of the keys is of the same kernel as `wanted`, made from another source.
bool has_of_another_source(const std::vector<CacheKey>& keys, const CacheKey& wanted) {
  constexpr std::string_view kOfTheVersion[] = {"numerics", "options", "schema", "source"};
  const auto of_the_operation = [&](const CacheKey& key) {
    auto fields = key.fields;
    std::erase_if(
        fields, [&](const auto& field) { return llvm::is_contained(kOfTheVersion, field.first); });
    return fields;
  };
  const auto fields = of_the_operation(wanted);
  return llvm::any_of(keys, [&](const CacheKey& key) { return of_the_operation(key) == fields; });
}

[[noreturn]] void raise_offline(const KernelSpec& spec, const std::string& name,
                                const CacheKey& key, CacheStore& store) {
  std::string places = store.directory();
  if (!places.empty() && !store.disabled_reason().empty())
    places += " (not used: " + store.disabled_reason() + ")";
  else if (const std::string why = store.objection(key); !why.empty())
    places += " (" + key.digest + ".kernel is there, but " + why + ")";
  for (const std::shared_ptr<const Pack>& pack : store.packs()) {
    const PackSummary summary = summarize(*pack);
    const std::string archs = llvm::join(summary.archs, ", ");
    places += (places.empty() ? "" : ", ") + pack->path() + " (a pack for " +
              (archs.empty() ? "nothing" : archs) +
              (has_of_another_source(summary.keys, key)
                   ? ", whose kernel of this name has another source, as after an update of sagebwd"
                   : "") +
              ")";
  }
  throw OfflineError(
      "SAGEBWD_OFFLINE=1 forbids compiling, and " + name + " for " + std::string(spec.arch.name) +
      " is not in " +
      (places.empty() ? "any place: neither a directory nor a pack is named" : places));
}

/// Kernels that take longest to compile come first: a long compile that began last would leave the
/// other cores idle.
int place_in_queue(const KernelSpec& spec) {
  const bool backward = spec.pass == Pass::backward;
  if (spec.kind == KernelKind::quantize)
    return backward ? 0 : 3;
  return !definition_of(spec.kind).tiling ? 4 : backward ? 1 : 2;
}

} // namespace

KernelBuilder::Built KernelBuilder::find_in_memory(const KernelSpec& spec) const {
  std::shared_future<Built> kernel;
  {
    std::lock_guard lock(mutex_);
    auto found = kernels_.find(spec);
    if (found == kernels_.end())
      return nullptr;
    kernel = found->second;
  }
  return wait_for(kernel); // another thread may be building it; raises that thread's error
}

void KernelBuilder::forget_unfinished() {
  compiling_ = 0;
  std::lock_guard lock(mutex_);
  std::erase_if(kernels_, [](const auto& kernel) {
    return kernel.second.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  });
}

KernelBuilder::Built KernelBuilder::build(const KernelSpec& spec) {
  if (Built kernel = find_in_memory(spec)) {
    ++store_.counters().memory_hits;
    return kernel;
  }

  std::promise<Built> promise;
  {
    std::unique_lock lock(mutex_);
    auto [place, first] = kernels_.try_emplace(spec, promise.get_future().share());
    if (!first) {
      std::shared_future<Built> kernel = place->second;
      lock.unlock();
      return wait_for(kernel);
    }
  }
  try {
    auto kernel = std::make_shared<const BuiltKernel>(make(spec));
    promise.set_value(kernel);
    return kernel;
  } catch (...) {
    {
      std::unique_lock lock(mutex_);
      kernels_.erase(spec);
    }
    promise.set_exception(std::current_exception());
    throw;
  }
}

void KernelBuilder::say_waiting(const std::string& what, const std::string& holder,
                                std::chrono::milliseconds left) {
  if (!said_waiting_.exchange(true)) // say it once: other processes may hold further locks
    std::fprintf(stderr,
                 "sagebwd: waiting for %s, which is compiling %s; after another %.0f s it is "
                 "compiled here as well\n",
                 holder.c_str(), what.c_str(), std::chrono::duration<double>(left).count());
}

void KernelBuilder::say_compiling(const std::string& arch) {
  const Clock::duration since{compiled_at_ - compiling_since_};
  if (since < policy_.announce_after || !settings().log.empty() || said_compiling_.exchange(true))
    return;
  const std::string& why = store_.disabled_reason();
  std::fprintf(
      stderr,
      "sagebwd: compiling kernels for %s, for %.0f s so far. %s. SAGEBWD_LOG=1 lists "
      "them, SAGEBWD_LOG=0 leaves this line out\n",
      arch.c_str(), std::chrono::duration<double>(since).count(),
      why.empty()
          ? ("They are kept in " + store_.directory() + ", where later processes find them").c_str()
          : ("They are not kept on disk: " + why).c_str());
}

CacheEntry KernelBuilder::compile(const KernelSource& source, const KernelSpec& spec,
                                  const CacheKey& key) {
  const auto start = Clock::now();
  // If other threads compile at the same time, or another thread finished less than a pause ago,
  // the user sees one continuous wait.
  constexpr std::chrono::seconds kPause{1};
  const Clock::duration began = start.time_since_epoch();
  if (compiling_++ == 0 && began - Clock::duration{compiled_at_} > kPause)
    compiling_since_ = began.count();
  const auto end = llvm::make_scope_exit([this] { --compiling_; });
  Compiled compiled = compile_(source, spec);
  const auto spent = Clock::now() - start;
  compiled_at_ = Clock::now().time_since_epoch().count();
  log_kernel(source.name, std::string(spec.arch.name), "",
             std::chrono::duration<double>(spent).count());
  say_compiling(std::string(spec.arch.name));
  CacheCounters& counters = store_.counters();
  ++counters.compiles;
  counters.compile_us +=
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(spent).count());
  if (compiled.keep)
    store_.publish(key, compiled.entry);
  return std::move(compiled.entry);
}

BuiltKernel KernelBuilder::make(const KernelSpec& spec) {
  KernelSource source = emit_(spec);
  const CacheKey key = key_of(source, spec);
  BuiltKernel kernel{spec, {}, source.threads, source.shared_bytes, /*cached=*/true};
  const auto start = Clock::now();
  std::string place = store_.directory();
  std::optional<CacheEntry> entry = store_.load(key, policy_.accept, &place);
  if (!entry && policy_.offline)
    raise_offline(spec, source.name, key, store_);
  if (!entry) {
    if (policy_.check_compiler)
      policy_.check_compiler();
    const KeyLock lock = store_.lock(key, [&](const std::string& holder, auto left) {
      say_waiting(source.name + " for " + std::string(spec.arch.name), holder, left);
    });
    store_.counters().waits += lock.waited();
    store_.counters().timeouts += lock.timed_out();
    // The process that held the lock may have built the kernel.
    entry = store_.load_again(key, policy_.accept);
    kernel.cached = entry.has_value();
    if (!entry)
      entry = compile(source, spec, key);
  }
  if (kernel.cached)
    log_kernel(source.name, std::string(spec.arch.name), place,
               std::chrono::duration<double>(Clock::now() - start).count());
  kernel.entry = std::move(*entry);
  return kernel;
}

std::vector<KernelBuilder::Built> KernelBuilder::build_all(const std::vector<KernelSpec>& specs,
                                                           size_t width) {
  std::vector<size_t> queue(specs.size());
  std::iota(queue.begin(), queue.end(), size_t{0});
  std::stable_sort(queue.begin(), queue.end(), [&](size_t a, size_t b) {
    return place_in_queue(specs[a]) < place_in_queue(specs[b]);
  });
  std::vector<Built> kernels(specs.size());
  parallel_for(specs.size(), width ? width : compile_width(),
               [&](size_t i) { kernels[queue[i]] = build(specs[queue[i]]); });
  return kernels;
}

} // namespace sagebwd
