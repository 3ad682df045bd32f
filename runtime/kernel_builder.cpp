//===- kernel_builder.cpp - Memory, disk, packs, compile -------------------===//

#include "runtime/kernel_builder.h"
#include "cache/inventory.h"
#include "runtime/compile_width.h"
#include "runtime/parallel_for.h"
#include "runtime/prebuild_command.h"

#include <chrono>
#include <cstdio>
#include <mutex>

namespace sagebwd {

size_t KernelSpecHash::operator()(const KernelSpec& spec) const {
  size_t hash = std::hash<std::string_view>()(spec.arch.name);
  const auto add = [&](auto value) {
    hash = hash * 1000003 + static_cast<size_t>(value); // collisions only cost a comparison
  };
  add(spec.kind);
  add(spec.pass);
  visit_fields(spec, [&](const Label&, auto value) { add(value); });
  return hash;
}

KernelBuilder::Built KernelBuilder::find_in_memory(const KernelSpec& spec) const {
  std::shared_future<Built> kernel;
  {
    std::lock_guard lock(mutex_);
    auto found = kernels_.find(spec);
    if (found == kernels_.end())
      return nullptr;
    kernel = found->second;
  }
  return kernel.get(); // waits, or raises, where another thread is building it
}

void KernelBuilder::forget_unfinished() {
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
      return kernel.get();
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

namespace {

[[noreturn]] void raise_offline(const KernelSpec& spec, const std::string& name,
                                const CacheKey& key, CacheStore& store) {
  std::string places = store.directory();
  if (!places.empty() && !store.disabled_reason().empty())
    places += " (not used: " + store.disabled_reason() + ")";
  else if (const std::string why = store.objection(key); !why.empty())
    places += " (" + key.digest + ".kernel is there, but " + why + ")";
  for (const std::shared_ptr<const Pack>& pack : store.packs()) {
    std::string archs;
    for (const std::string& arch : summarize(*pack).archs)
      archs += (archs.empty() ? "" : ", ") + arch;
    places += (places.empty() ? "" : ", ") + pack->path() + " (a pack for " +
              (archs.empty() ? "nothing" : archs) + ")";
  }
  throw OfflineError(
      "SAGEBWD_OFFLINE=1 forbids compiling, and " + name + " for " + std::string(spec.arch.name) +
          " is not in " +
          (places.empty() ? "any place: neither a directory nor a pack is named" : places),
      prebuild_command(spec));
}

} // namespace

void KernelBuilder::say_waiting(const std::string& what, const std::string& holder,
                                std::chrono::milliseconds left) {
  if (!said_waiting_.exchange(true)) // it need not be the only one
    std::fprintf(stderr,
                 "sagebwd: waiting for %s, which is compiling %s; after another %.0f s it is "
                 "compiled here as well\n",
                 holder.c_str(), what.c_str(), std::chrono::duration<double>(left).count());
}

CacheEntry KernelBuilder::compile(const KernelSource& source, const KernelSpec& spec,
                                  const CacheKey& key) {
  const auto start = std::chrono::steady_clock::now();
  Compiled compiled = compile_(source, spec);
  const auto spent = std::chrono::steady_clock::now() - start;
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
  std::optional<CacheEntry> entry = store_.load(key, policy_.accept);
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
    entry = store_.load_again(key, policy_.accept); // of whoever had the lock until now
    kernel.cached = entry.has_value();
    if (!entry)
      entry = compile(source, spec, key);
  }
  kernel.entry = std::move(*entry);
  return kernel;
}

std::vector<KernelBuilder::Built> KernelBuilder::build_all(const std::vector<KernelSpec>& specs) {
  std::vector<Built> kernels(specs.size());
  parallel_for(specs.size(), compile_width(), [&](size_t i) { kernels[i] = build(specs[i]); });
  return kernels;
}

} // namespace sagebwd
