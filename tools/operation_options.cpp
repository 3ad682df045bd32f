//===- operation_options.cpp - Options that choose operations ---------------===//
#include "tools/operation_options.h"
#include "generator/operation.h"

#include "cache/whole_file.h"
#include "tools/spec_list.h"

#include "llvm/ADT/STLExtras.h"

#include <set>

namespace sagebwd::tools {

namespace json = llvm::json;

void OperationOptions::declare(OptionTable& options) {
  options.list("arch", "ARCH,..", archs_,
               "architectures, or native for those of this machine's GPUs, all, or major for the "
               "first of each major version (default native; without a GPU " +
                   (without_gpu_.empty() ? "it must be given" : without_gpu_) + ")");
  options.offer(arch_words());
  spec_.declare(options, /*lists=*/true);
  options.list("pass", "PASS,..", passes_, "passes: forward, backward");
  options.offer(words_of<Pass>());
  options.text("specs", "FILE", specs_file_, "a list of specs, instead of the options above");
}

std::vector<WantedOperation> OperationOptions::named(const OptionTable& options) const {
  if (!specs_file_.empty()) {
    const std::set<std::string> others = {"specs",   "records", "out",
                                          "dry-run", "json",    "recompile"};
    for (const std::string& name : options.given())
      if (!others.count(name))
        throw UsageError("--specs and --" + name +
                         " contradict each other: the file says what to build");
    return parse_spec_list(read_input(specs_file_), specs_file_);
  }
  std::vector<std::string> archs = archs_;
  if (archs.empty() && has_gpu())
    archs = {"native"};
  else if (archs.empty() && !without_gpu_.empty())
    archs = {without_gpu_};
  if (archs.empty())
    throw UsageError("name architectures with --arch (e.g. --arch sm_80,sm_90a), or a list of "
                     "specs with --specs: there is no GPU here whose architecture could be meant");
  bool forward = false, backward = false;
  for (const std::string& pass : passes_)
    (parse_word<Pass>(pass) == Pass::forward ? forward : backward) = true;
  std::vector<WantedOperation> operations;
  for (const Arch& arch : parse_archs(archs))
    for (const AttentionSpec& spec : spec_.all(options))
      operations.push_back({spec, arch, forward, backward});
  return operations;
}

std::vector<WantedOperation> OperationOptions::wanted(const OptionTable& options,
                                                      std::vector<std::string>& impossible) const {
  const std::vector<WantedOperation> operations = named(options);
  std::vector<WantedOperation> left;
  for (const WantedOperation& operation : operations) {
    WantedOperation possible = operation;
    for (bool WantedOperation::*pass : {&WantedOperation::forward, &WantedOperation::backward}) {
      WantedOperation alone{operation.spec, operation.arch, false, false};
      if (alone.*pass = operation.*pass; !(alone.*pass))
        continue;
      try {
        kernels_of({alone});
      } catch (const SpecError& error) {
        if (operations.size() == 1)
          throw;
        possible.*pass = false;
        if (!llvm::is_contained(impossible, error.what()))
          impossible.push_back(error.what());
      }
    }
    if (possible.forward || possible.backward)
      left.push_back(possible);
  }
  if (left.empty())
    throw UsageError(impossible.front());
  return left;
}

std::vector<OperationKernels>
OperationOptions::operations(const OptionTable& options,
                             std::vector<std::string>& impossible) const {
  std::vector<OperationKernels> operations;
  std::set<std::string> seen; // some kernels serve both passes, or several specs
  for (const WantedOperation& wanted : wanted(options, impossible)) {
    OperationKernels operation{wanted.arch, resolved(wanted.spec), {}};
    const auto add = [&](const std::vector<KernelSpec>& kernels) {
      for (const KernelSpec& kernel : kernels)
        if (seen.insert(std::string(operation.arch.name) + " " + kernel_name(kernel)).second)
          operation.kernels.push_back(kernel);
    };
    for (const Pass pass : {Pass::forward, Pass::backward})
      if (pass == Pass::forward ? wanted.forward : wanted.backward)
        add(Operation(operation.spec, operation.arch).kernels_of_any_call(pass));
    add(kernels_beside(operation.spec, operation.arch));
    if (!operation.kernels.empty())
      operations.push_back(std::move(operation));
  }
  return operations;
}

ExitCode list_kernels(const Command& command, const std::vector<KernelSpec>& kernels,
                      const std::vector<std::string>& failures) {
  Table table;
  for (const KernelSpec& kernel : kernels)
    table.add({{"name", "kernel", kernel_name(kernel)},
               {"arch", "arch", std::string(kernel.arch.name)},
               {"pass", "pass", std::string(to_string(kernel.pass))}});
  return command.finish(
      json::Object{{"kernels", table.json()}, {"failures", json::Array(failures)}}, [&] {
        table.print();
        puts(counted(kernels.size(), "kernel").c_str());
      });
}

} // namespace sagebwd::tools
