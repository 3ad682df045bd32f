//===- kernel_builder.h - Memory, disk, compile ----------------------------===//
//
// The order in which a kernel is looked for, apart from who emits and who compiles it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/kernels.h"

#include <functional>
#include <future>
#include <shared_mutex>
#include <unordered_map>

namespace sagebwd {

struct KernelSpecHash {
  size_t operator()(const KernelSpec&) const;
};

/// Thread-safe. Two threads that ask for one spec compile it once; different specs compile at the
/// same time. A failure is reported to everyone who waits for it, and not remembered.
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

  KernelBuilder(CacheStore& store, Emit emit, Compile compile)
      : store_(store), emit_(std::move(emit)), compile_(std::move(compile)) {}

  Built build(const KernelSpec&);
  /// On at most as many threads as the machine runs at once. Raises the error of the first spec,
  /// in the given order, of those that failed.
  std::vector<Built> build_all(const std::vector<KernelSpec>&);

private:
  Built find_in_memory(const KernelSpec&) const;
  /// Every layer below memory.
  BuiltKernel make(const KernelSpec&);

  CacheStore& store_;
  Emit emit_;
  Compile compile_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<KernelSpec, std::shared_future<Built>, KernelSpecHash> kernels_;
};

/// Compiles with NVRTC, the only function here that opens it. CompileError for a result with spills
/// or ptxas warnings, unless SAGEBWD_ALLOW_SPILLS=1; then it is not kept.
KernelBuilder::Compiled compile_with_nvrtc(const KernelSource&, const KernelSpec&);

} // namespace sagebwd
