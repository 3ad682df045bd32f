//===- prebuild.h - One pack of every kernel that operations need ---------===//
//
// For machines that may not compile. The pack's bytes depend on what is in it, not on the order in
// which it was asked for or made, nor on how often making it was interrupted.
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

/// What a pack is to serve.
struct WantedOperation {
  AttentionSpec spec; ///< group sizes of 0: the architecture's default
  Arch arch;
  bool forward = true, backward = true;
};

/// Every kernel of the operations with its default tile and with the tiles of those tuning records
/// that are of them; each once, in a fixed order. Raises SpecError for an operation or a record's
/// tile that cannot be built.
std::vector<KernelSpec> kernels_of(const std::vector<WantedOperation>&,
                                   const std::vector<TuningRecord>& = {});
/// Those of the records that are of one of the operations' kernels, as this version generates them.
std::vector<TuningRecord> records_of(const std::vector<WantedOperation>&,
                                     const std::vector<TuningRecord>&);

struct PrebuildRequest {
  std::string output; ///< the pack's file
  std::vector<KernelSpec> kernels;
  std::vector<TuningRecord> records;
  /// Called after each kernel, by the thread that called prebuild(). What it raises ends the work.
  std::function<void(const BuiltKernel&, size_t done, size_t total)> progress = nullptr;

  /// Tests put others in their place.
  KernelBuilder::Emit emit = generate;
  KernelBuilder::Compile compile = compile_with_nvrtc;
  /// The name that `compile` gives itself in its entries; asked once. NVRTC's by default, which
  /// also has to know every architecture.
  std::function<std::string()> compiler = nullptr;
};

struct PrebuildResult {
  /// Sorted as in kernels_of(). `cached` is one that an earlier, interrupted run had compiled.
  std::vector<std::shared_ptr<const BuiltKernel>> kernels;
  size_t records = 0;
  uint64_t pack_bytes = 0;
  size_t threads = 0; ///< that compiled at the same time
};

/// Compiles the kernels in parallel, each at once kept in the folder "OUTPUT.partial", where the
/// next run finds it should this one be killed; writes the pack; removes the folder. Compiles also
/// under SAGEBWD_OFFLINE=1: that is what it is for.
///
/// Raises PackError for an output that cannot be written, or that another process is writing;
/// LibraryError without an NVRTC for all architectures; CompileError where kernels do not compile,
/// with the names of all of them: then there is no pack, and the others stay in the folder.
PrebuildResult prebuild(const PrebuildRequest&);

} // namespace sagebwd
