//===- kernels.h - From a KernelSpec to machine code -----------------------===//
//
// Memory, then the user's directory, then a compile: the only way to a cubin.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/entry.h"
#include "cache/store.h"
#include "generator/emit.h"
#include "generator/kernel.h"
#include "runtime/error.h"

#include <memory>
#include <vector>

namespace sagebwd {

/// A kernel ready to load.
struct BuiltKernel {
  KernelSpec spec;
  CacheEntry entry;
  int threads = 0;
  int shared_bytes = 0; ///< dynamic
  bool cached = false;  ///< this process did not compile it
};

/// The process's store, in the directory its environment names.
CacheStore& user_store();

/// The key under which a kernel is kept.
CacheKey key_of(const KernelSource&, const KernelSpec&);

/// Makes what the generator keeps in statics of its functions, which takes milliseconds. A child
/// that is forked while another thread makes one waits for it for ever.
void make_tables();

/// Raises CompileError, LibraryError (no NVRTC where one is needed, or a fork within it),
/// OfflineError, PackError or SpecError.
std::shared_ptr<const BuiltKernel> build(const KernelSpec&);
/// The same for several, compiled in parallel; results in the given order.
std::vector<std::shared_ptr<const BuiltKernel>> build_all(const std::vector<KernelSpec>&);
/// The same for kernels of one operation: an OfflineError names the command that builds all of it.
std::vector<std::shared_ptr<const BuiltKernel>> build_operation(const std::vector<KernelSpec>&,
                                                                const ResolvedSpec&);
/// What build_operation() raises for an error about one of the operation's kernels.
OfflineError of_operation(const OfflineError&, const std::vector<KernelSpec>&, const ResolvedSpec&);

} // namespace sagebwd
