//===- kernel_builder.h - Memory, disk, packs, compile ---------------------===//
//
// The order in which a kernel is looked for, apart from who emits and who compiles it.
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

/// Thread-safe. Threads and processes that ask for one spec compile it once; different specs
/// compile at the same time. A failure is reported to every thread that waits for it, and not
/// remembered.
class KernelBuilder {
public:
  using Built = std::shared_ptr<const BuiltKernel>;
  using Emit = std::function<KernelSource(const KernelSpec&)>;
  /// Whether a result may be kept is for the compiler to say: what is on disk is always sound.
  struct Compiled {
    CacheEntry entry;
    bool keep = true;
  };
  using Compile = std::function<Compiled(const KernelSource&, const KernelSpec&)>;

  struct Policy {
    bool offline = false; ///< a kernel that is in no layer is an OfflineError
    /// Kept entries for which this is false are compiled anew; without it all count.
    CacheStore::Accept accept = nullptr;
    /// Raises where this process cannot compile: before another is waited for, not after a minute.
    std::function<void()> check_compiler = nullptr;
    /// Compiling that lasts longer says so, once, on standard error.
    std::chrono::milliseconds announce_after = std::chrono::hours{24 * 365};
    /// By `offline` and `recompile`: only entries of the NVRTC at hand count. Its check is of
    /// forks.
    static Policy of(const Settings&);
  };

  KernelBuilder(CacheStore& store, Emit emit, Compile compile, Policy policy)
      : store_(store), emit_(std::move(emit)), compile_(std::move(compile)),
        policy_(std::move(policy)) {}
  KernelBuilder(CacheStore& store, Emit emit, Compile compile)
      : KernelBuilder(store, std::move(emit), std::move(compile), Policy()) {}

  Built build(const KernelSpec&);
  /// On as many threads as compile_width() says, those first that take longest. Raises the error
  /// of the first, in the order in which they are begun, of those that failed.
  std::vector<Built> build_all(const std::vector<KernelSpec>&);

private:
  Built find_in_memory(const KernelSpec&) const;
  /// In a forked child: what another thread of its parent builds never comes.
  void forget_unfinished();
  /// Every layer below memory.
  BuiltKernel make(const KernelSpec&);
  CacheEntry compile(const KernelSource&, const KernelSpec&, const CacheKey&);
  /// One line to standard error, for the first kernel that another process keeps waiting.
  void say_waiting(const std::string& what, const std::string& holder, std::chrono::milliseconds);
  /// One line to standard error, once this process has been compiling for some seconds.
  void say_compiling(const std::string& arch);

  CacheStore& store_;
  Emit emit_;
  Compile compile_;
  Policy policy_;
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> said_waiting_{false}, said_compiling_{false};
  std::atomic<int> compiling_{0}; ///< kernels at this moment
  std::atomic<Clock::rep> compiling_since_{0}, compiled_at_{0};
  mutable ForkSafeMutex mutex_; ///< of what follows
  std::unordered_map<KernelSpec, std::shared_future<Built>, KernelSpecHash> kernels_;
  AtFork forget_{nullptr, nullptr, [this] { forget_unfinished(); }};
};

} // namespace sagebwd
