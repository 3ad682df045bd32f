//===- kernel_builder.h - Find a kernel, or compile it --------------------===//
//
// A KernelBuilder looks for a kernel in memory, in the directory and in packs, in this order, and
// compiles it if it is in none of them. Callers supply the functions that generate a source and
// that compile it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/at_fork.h"
#include "generator/emit.h"
#include "runtime/kernels.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <unordered_map>

namespace sagebwd {

struct Settings;

struct KernelSpecHash {
  size_t operator()(const KernelSpec&) const;
};

/// Thread-safe. If threads or processes ask for the same spec, it is compiled once; different specs
/// compile at the same time. A failure is reported to every thread that waits for it, and is not
/// remembered: the next call tries again.
class KernelBuilder {
public:
  using Built = std::shared_ptr<const BuiltKernel>;
  using Emit = std::function<KernelSource(const KernelSpec&)>;
  /// The compiler decides whether a result may be kept in the cache: kernels on disk always run
  /// without spills.
  struct Compiled {
    CacheEntry entry;
    bool keep = true;
  };
  using Compile = std::function<Compiled(const KernelSource&, const KernelSpec&)>;

  struct Policy {
    bool offline = false; ///< raise OfflineError for a kernel that is in no layer
    /// Kept entries for which this returns false are compiled again; null accepts every entry.
    CacheStore::Accept accept = nullptr;
    /// Raises if this process cannot compile. Called before a wait for another process, so that the
    /// error comes at once and not after a minute.
    std::function<void()> check_compiler = nullptr;
    /// If compiling takes longer, one line on standard error says so, once.
    std::chrono::milliseconds announce_after = std::chrono::hours{24 * 365};
    /// The policy of the settings `offline` and `recompile` (under `recompile` only entries of this
    /// process's NVRTC are accepted). The policy's check_compiler refuses forked processes.
    static Policy of(const Settings&);
  };

  KernelBuilder(CacheStore& store, Emit emit, Compile compile, Policy policy)
      : store_(store), emit_(std::move(emit)), compile_(std::move(compile)),
        policy_(std::move(policy)) {}
  KernelBuilder(CacheStore& store, Emit emit, Compile compile)
      : KernelBuilder(store, std::move(emit), std::move(compile), Policy()) {}

  Built build(const KernelSpec&);
  /// Builds on `width` threads (0: compile_width()), kernels that compile longest first. If kernels
  /// fail, raises the error of the one that began first.
  std::vector<Built> build_all(const std::vector<KernelSpec>&, size_t width = 0);

private:
  Built find_in_memory(const KernelSpec&) const;
  /// In a forked child, forgets kernels that another thread of the parent was building: they would
  /// never be finished.
  void forget_unfinished();
  /// Searches every layer below memory, then compiles.
  BuiltKernel make(const KernelSpec&);
  CacheEntry compile(const KernelSource&, const KernelSpec&, const CacheKey&);
  /// Prints one line to standard error for the first kernel for which another process makes this
  /// process wait.
  void say_waiting(const std::string& what, const std::string& holder, std::chrono::milliseconds);
  /// Prints one line to standard error once this process has been compiling for some seconds.
  void say_compiling(const std::string& arch);

  CacheStore& store_;
  Emit emit_;
  Compile compile_;
  Policy policy_;
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> said_waiting_{false}, said_compiling_{false};
  std::atomic<int> compiling_{0}; ///< kernels that are being compiled at this moment
  std::atomic<Clock::rep> compiling_since_{0}, compiled_at_{0};
  mutable ForkSafeMutex mutex_; ///< guards the members below
  std::unordered_map<KernelSpec, std::shared_future<Built>, KernelSpecHash> kernels_;
  AtFork forget_{nullptr, nullptr, [this] { forget_unfinished(); }};
};

} // namespace sagebwd
