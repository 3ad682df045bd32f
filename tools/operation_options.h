//===- operation_options.h - Options that choose operations -----------------===//
#pragma once

#include "runtime/prebuild.h"
#include "tools/command.h"
#include "tools/console.h"
#include "tools/spec_options.h"

#include <string>
#include <vector>

namespace sagebwd::tools {

/// One architecture needs these kernels for one spec.
struct OperationKernels {
  Arch arch;
  ResolvedSpec spec;
  std::vector<KernelSpec> kernels; ///< except those of an earlier operation
};

/// 'build', 'prebuild' and 'cache explain' share these options: --arch, --pass, --specs, and those
/// of a spec.
class OperationOptions {
public:
  /// `usual`: the words of a spec that are the default. `without_gpu`: the architecture if none is
  /// named and there is no GPU; empty: one must be named.
  OperationOptions(SpecWords usual, std::string without_gpu)
      : spec_(std::move(usual)), without_gpu_(std::move(without_gpu)) {}

  void declare(OptionTable&);
  /// Those that can be built; of several, the reasons of the others go to `impossible`. A backward
  /// that an architecture cannot have leaves the forward. Raises UsageError, SpecError, and the
  /// only reason where nothing is left.
  std::vector<WantedOperation> wanted(const OptionTable&,
                                      std::vector<std::string>& impossible) const;
  /// Returns wanted(), each with its kernels in the order of their launches, and behind them those
  /// that no pass launches.
  std::vector<OperationKernels> operations(const OptionTable&,
                                           std::vector<std::string>& impossible) const;

private:
  std::vector<WantedOperation> named(const OptionTable&) const;

  SpecOptions spec_;
  std::string without_gpu_, specs_file_;
  std::vector<std::string> archs_, passes_{"forward", "backward"};
};

/// Ends a command that was given --dry-run: it prints a row for each kernel, and `failures`.
ExitCode list_kernels(const Command&, const std::vector<KernelSpec>&,
                      const std::vector<std::string>& failures);

} // namespace sagebwd::tools
