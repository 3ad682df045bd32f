//===- prebuild.h - Build one pack with every kernel of operations --------===//
//
// Machines that must not compile read kernels from such a pack. The bytes of a pack depend only on
// its contents, not on the order in which they were requested or built, nor on interruptions.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/compile_kernel.h"
#include "runtime/generate.h"
#include "runtime/kernel_builder.h"

#include <functional>
#include <string>
#include <vector>

namespace sagebwd {

/// An operation whose kernels a pack must contain.
struct WantedOperation {
  /// If a group size is 0, the architecture's default is used.
  AttentionSpec spec;
  Arch arch;
  bool forward = true, backward = true;
};

/// Every kernel of the operations, with its default tile and with the tiles of its tuning records;
/// each once, in a fixed order. Raises SpecError if an operation or a record's tile cannot be
/// built.
std::vector<KernelSpec> kernels_of(const std::vector<WantedOperation>&,
                                   const std::vector<TuningRecord>& = {});
/// The records that belong to a kernel of the operations, as this version generates it.
std::vector<TuningRecord> records_of(const std::vector<WantedOperation>&,
                                     const std::vector<TuningRecord>&);

struct PrebuildRequest {
  std::string output; ///< the path of the pack
  std::vector<KernelSpec> kernels;
  std::vector<TuningRecord> records;
  /// Called after each kernel by the thread that called prebuild(). An error that it raises ends
  /// the work.
  std::function<void(const BuiltKernel&, size_t done, size_t total)> progress = nullptr;

  /// Tests replace these two.
  KernelBuilder::Emit emit = generate;
  KernelBuilder::Compile compile = compile_with_nvrtc;
  /// The name with which `compile` identifies itself in entries; called once. Null: NVRTC's, which
  /// then must support every architecture.
  std::function<std::string()> compiler = nullptr;
};

struct PrebuildResult {
  /// In the order of kernels_of(). `cached` means that an earlier, interrupted run had compiled the
  /// kernel.
  std::vector<std::shared_ptr<const BuiltKernel>> kernels;
  size_t records = 0;
  uint64_t pack_bytes = 0;
  size_t threads = 0; ///< threads that compiled at the same time
};

/// Compiles the kernels in parallel, writes the pack and removes the work folder. Each kernel is
/// kept at once in the folder "OUTPUT.partial", where the next run finds it if this run is killed.
/// prebuild() compiles also under SAGEBWD_OFFLINE=1, because compiling is its purpose.
///
/// Raises PackError if the output cannot be written or another process is writing it; LibraryError
/// if there is no NVRTC for all architectures; CompileError if kernels do not compile, with the
/// names of all of them: then no pack is written, and the other kernels stay in the folder.
PrebuildResult prebuild(const PrebuildRequest&);

} // namespace sagebwd
