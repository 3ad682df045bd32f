//===- kernels.h - Turn a KernelSpec into machine code --------------------===//
//
// The functions of this header are the only way to a cubin. They look for a kernel in memory, then
// in the user's directory, then in packs; if a kernel is in none of them, they compile it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/entry.h"
#include "cache/store.h"
#include "generator/emit.h"
#include "generator/kernel.h"
#include "runtime/error.h"
#include "runtime/settings.h"

#include <memory>
#include <vector>

namespace sagebwd {

/// A kernel that is ready to be loaded.
struct BuiltKernel {
  KernelSpec spec;
  CacheEntry entry;
  int threads = 0;
  int shared_bytes = 0; ///< dynamic shared memory
  bool cached = false;  ///< true if this process did not compile it
};

/// The process's store, in the directory that the environment names.
CacheStore& user_store();

/// The key under which a kernel is kept in the cache.
CacheKey key_of(const KernelSource&, const KernelSpec&);

/// Whether this version of sagebwd looks for a kernel by this key: it would not if another version
/// wrote the key, from another source or with other fields.
bool is_current(const CacheKey&, const Settings& = settings());

/// Builds the tables that the generator keeps in function-local statics, which takes milliseconds.
/// If a process forks while a thread builds one, the child waits for that table for ever; so they
/// are built early.
void make_tables();

/// Raises CompileError, LibraryError (a kernel must be compiled and there is no NVRTC, or the
/// process forked inside NVRTC), OfflineError, PackError or SpecError.
std::shared_ptr<const BuiltKernel> build(const KernelSpec&);
/// Builds several kernels in parallel; results are in the given order.
std::vector<std::shared_ptr<const BuiltKernel>> build_all(const std::vector<KernelSpec>&);
/// Builds them on up to `width` threads while the caller goes on; who needs one of them meanwhile
/// waits for it. Errors are not reported: who needs the kernel tries again. The end of the process
/// interrupts it.
void build_in_background(const std::vector<KernelSpec>&, size_t width);
/// Builds the kernels of one operation, as build_all() does. An OfflineError then names the command
/// that builds the whole operation.
std::vector<std::shared_ptr<const BuiltKernel>> build_operation(const std::vector<KernelSpec>&,
                                                                const ResolvedSpec&);
/// Changes an OfflineError about one of an operation's kernels into the error that
/// build_operation() raises.
OfflineError of_operation(const OfflineError&, const std::vector<KernelSpec>&, const ResolvedSpec&);

} // namespace sagebwd
