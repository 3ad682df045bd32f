//===- prebuild.cpp - Build one pack with every kernel of operations ------===//

#include "runtime/prebuild.h"
#include "generator/definition.h"
#include "generator/emit.h"
#include "generator/operation.h"
#include "generator/space.h"

#include "cache/layout.h"
#include "runtime/compile_width.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/parallel_for.h"
#include "runtime/work_folder.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

namespace sagebwd {

namespace {

//===--- What is wanted ----------------------------------------------------===//

/// A text that is equal for equal kernels; sorting by it gives an order that does not depend on the
/// order of requests.
std::string identity_of(const KernelSpec& kernel) {
  std::string text(kernel.arch.name);
  for (const auto& [label, value] : labelled(kernel))
    text += " " + value;
  return text;
}

/// The kernel of a record, with the record's tile. Raises SpecError if the record has no kernel.
KernelSpec kernel_of(const TuningRecord& record) {
  const CacheKey& key = record.key;
  AttentionSpec spec;
  visit_fields(spec, [&]<typename T>(const Label& label, T& value) {
    value = read_value<T>(label, key[std::string(label.name)]);
  });
  const Arch& arch = find_arch(key["arch"]);
  const KernelSpec kernel =
      tiled_kernel(parse_tiled_kernel(key["kind"]), resolved(spec), arch, parse_tile(record.tile));
  check_tile(kernel);
  return kernel;
}

/// The identity of a kernel without its tile.
std::string untiled(KernelSpec kernel) {
  kernel.tile = {};
  return identity_of(kernel);
}

/// Whether this version would find the record: the record's key contains the source of the default
/// tile.
bool is_current(const TuningRecord& record, KernelSpec kernel) {
  kernel.tile = default_tile(kernel.kind, kernel.attention, kernel.arch);
  return record.key["source"] == sha256_hex(generate(kernel).text);
}

std::map<std::string, KernelSpec> default_kernels(const std::vector<WantedOperation>& operations) {
  std::map<std::string, KernelSpec> kernels;
  for (const WantedOperation& operation : operations) {
    const ResolvedSpec spec = resolved(operation.spec);
    for (Pass pass : {Pass::forward, Pass::backward})
      if (pass == Pass::forward ? operation.forward : operation.backward)
        for (const KernelSpec& kernel : Operation(spec, operation.arch).kernels_of_any_call(pass))
          kernels.emplace(identity_of(kernel), kernel);
    for (const KernelSpec& kernel : kernels_beside(spec, operation.arch))
      kernels.emplace(identity_of(kernel), kernel);
  }
  return kernels;
}

} // namespace

std::vector<TuningRecord> records_of(const std::vector<WantedOperation>& operations,
                                     const std::vector<TuningRecord>& records) {
  std::set<std::string> wanted;
  for (const auto& [identity, kernel] : default_kernels(operations))
    wanted.insert(untiled(kernel));
  std::vector<TuningRecord> found;
  for (const TuningRecord& record : records)
    try {
      if (const KernelSpec kernel = kernel_of(record);
          wanted.count(untiled(kernel)) && is_current(record, kernel))
        found.push_back(record);
    } catch (const SpecError& error) {
      throw SpecError("the tuning record " + record.key.digest +
                      " cannot be used: " + error.what());
    }
  return found;
}

std::vector<KernelSpec> kernels_of(const std::vector<WantedOperation>& operations,
                                   const std::vector<TuningRecord>& records) {
  std::map<std::string, KernelSpec> kernels = default_kernels(operations);
  for (const TuningRecord& record : records_of(operations, records)) {
    const KernelSpec kernel = kernel_of(record);
    kernels.emplace(identity_of(kernel), kernel);
  }
  std::vector<KernelSpec> list;
  for (const auto& [identity, kernel] : kernels)
    list.push_back(kernel);
  return list;
}

//===--- Building it -------------------------------------------------------===//

namespace {

/// Raises LibraryError if no NVRTC supports all architectures: this is better known at once than
/// after minutes.
std::string nvrtc_for(const std::vector<KernelSpec>& kernels) {
  Nvrtc& nvrtc = Nvrtc::instance();
  std::set<std::string_view> seen;
  for (const KernelSpec& kernel : kernels)
    if (seen.insert(kernel.arch.name).second)
      nvrtc.compile("nothing", "extern \"C\" __global__ void nothing() {}", kernel.arch.name);
  return nvrtc.identity();
}

/// Refuses kernels with spills even if this process allows them for itself: packs contain only
/// sound kernels.
KernelBuilder::Compile sound(const KernelBuilder::Compile& compile) {
  return [compile](const KernelSource& source, const KernelSpec& spec) {
    KernelBuilder::Compiled compiled = compile(source, spec);
    if (!compiled.keep)
      throw CompileError(source.name + " compiles for " + std::string(spec.arch.name) +
                             " with spills or warnings, which SAGEBWD_ALLOW_SPILLS=1 allows "
                             "this process alone; packs take sound kernels only",
                         "", "");
    return compiled;
  };
}

[[noreturn]] void raise_failures(const std::map<size_t, CompileError>& failures, size_t total,
                                 const PrebuildRequest& request) {
  std::string what = std::to_string(failures.size()) + " of " + std::to_string(total) +
                     " kernels do not compile, so " + request.output +
                     " is not written; the others are kept in " +
                     layout::work_folder_of(request.output);
  for (const auto& [index, error] : failures)
    what += std::string("\n") + error.what();
  const CompileError& first = failures.begin()->second;
  throw CompileError(what, first.log, first.numbered_source);
}

} // namespace

PrebuildResult prebuild(const PrebuildRequest& request) {
  std::map<std::string, KernelSpec> unique;
  for (const KernelSpec& kernel : request.kernels)
    unique.emplace(identity_of(kernel), kernel);
  std::vector<KernelSpec> kernels;
  for (const auto& [identity, kernel] : unique)
    kernels.push_back(kernel);

  WorkFolder folder(request.output);
  const std::string compiler = request.compiler ? request.compiler() : nvrtc_for(kernels);
  StoreOptions options;
  options.directory = folder.path();
  options.byte_limit = 0;
  options.check_interrupt = check_interrupt;
  options.if_not_kept = "If this prebuild is interrupted, the next one starts from the beginning.";
  CacheStore store(options);
  KernelBuilder::Policy policy;
  policy.accept = [&](const CacheEntry& entry) { return entry.compiler == compiler; };
  KernelBuilder builder(store, request.emit, sound(request.compile), policy);

  PrebuildResult result;
  result.threads = std::max<size_t>(1, std::min(kernels.size(), compile_width()));
  result.kernels.resize(kernels.size());
  std::map<size_t, CompileError> failures;
  std::mutex failures_mutex;
  const auto build = [&](size_t i) {
    try {
      result.kernels[i] = builder.build(kernels[i]);
    } catch (const CompileError& error) { // the other kernels are still needed
      std::lock_guard lock(failures_mutex);
      failures.emplace(i, error);
    }
  };
  size_t built = 0;
  parallel_for(kernels.size(), result.threads, build, [&](size_t i) {
    if (result.kernels[i] && request.progress)
      request.progress(*result.kernels[i], ++built, kernels.size());
  });
  if (!failures.empty())
    raise_failures(failures, kernels.size(), request);

  std::vector<std::string> items;
  for (const auto& kernel : result.kernels)
    items.push_back(serialize(key_of(request.emit(kernel->spec), kernel->spec), kernel->entry));
  for (const TuningRecord& record : request.records)
    items.push_back(serialize(record));
  result.pack_bytes = write_pack(request.output, items);
  folder.remove();
  result.records = request.records.size();
  return result;
}

} // namespace sagebwd
