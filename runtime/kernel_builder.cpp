//===- kernel_builder.cpp - Memory, disk, compile --------------------------===//

#include "runtime/kernel_builder.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace sagebwd {

size_t KernelSpecHash::operator()(const KernelSpec& spec) const {
  size_t hash = std::hash<std::string_view>()(spec.arch.name);
  auto add = [&](auto value) {
    hash = hash * 1000003 + static_cast<size_t>(value); // collisions only cost a comparison
  };
  add(spec.kind);
  add(spec.pass);
  const AttentionSpec& attention = spec.attention;
  add(attention.head_dim);
  add(attention.dtype);
  add(attention.causal);
  add(attention.granularity);
  add(attention.precision);
  add(attention.smooth_k);
  add(attention.rotate);
  add(attention.deterministic);
  add(attention.group_q);
  add(attention.group_kv);
  add(spec.tile.block_q);
  add(spec.tile.block_kv);
  add(spec.tile.warps);
  add(spec.tile.stages);
  add(spec.tile.blocks_per_sm);
  return hash;
}

KernelBuilder::Built KernelBuilder::find_in_memory(const KernelSpec& spec) const {
  std::shared_future<Built> kernel;
  {
    std::shared_lock lock(mutex_);
    auto found = kernels_.find(spec);
    if (found == kernels_.end())
      return nullptr;
    kernel = found->second;
  }
  return kernel.get(); // waits, or raises, where another thread is building it
}

KernelBuilder::Built KernelBuilder::build(const KernelSpec& spec) {
  if (Built kernel = find_in_memory(spec))
    return kernel;

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

BuiltKernel KernelBuilder::make(const KernelSpec& spec) {
  KernelSource source = emit_(spec);
  CacheKey key = key_of(source, spec);
  BuiltKernel kernel{spec, {}, source.threads, source.shared_bytes, /*cached=*/true};
  if (std::optional<CacheEntry> entry = store_.load(key)) {
    kernel.entry = std::move(*entry);
    return kernel;
  }
  kernel.cached = false;
  Compiled compiled = compile_(source, spec);
  if (compiled.keep)
    store_.publish(key, compiled.entry);
  kernel.entry = std::move(compiled.entry);
  return kernel;
}

std::vector<KernelBuilder::Built> KernelBuilder::build_all(const std::vector<KernelSpec>& specs) {
  std::vector<Built> kernels(specs.size());
  std::vector<std::exception_ptr> errors(specs.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    for (size_t i; !failed && (i = next++) < specs.size();)
      try {
        kernels[i] = build(specs[i]);
      } catch (...) {
        errors[i] = std::current_exception();
        failed = true;
      }
  };

  size_t width = std::min<size_t>(specs.size(), std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> helpers;
  try {
    for (size_t i = 1; i < width; ++i)
      helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those there are do the work.
  }
  work();
  for (std::thread& helper : helpers)
    helper.join();
  for (const std::exception_ptr& error : errors)
    if (error)
      std::rethrow_exception(error);
  return kernels;
}

} // namespace sagebwd
