//===- prebuild.cpp - One pack of every kernel that operations need --------===//

#include "runtime/prebuild.h"

#include "cache/layout.h"
#include "runtime/compile_width.h"
#include "runtime/nvrtc/nvrtc.h"
#include "runtime/work_folder.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace sagebwd {

namespace {

using Built = std::shared_ptr<const BuiltKernel>;

//===--- What is wanted ----------------------------------------------------===//

/// Equal for kernels that are equal, and an order that no list decides.
std::string identity_of(const KernelSpec& kernel) {
  std::string text(kernel.arch.name);
  for (const auto& [label, value] : labelled(kernel))
    text += " " + value;
  return text;
}

/// The kernel that a record is of, with the record's tile. Raises SpecError for a record that is of
/// none.
KernelSpec kernel_of(const TuningRecord& record) {
  const CacheKey& key = record.key;
  const auto number = [&](const char* label) {
    const std::string text = key[label];
    const bool digits = !text.empty() && text.size() < 6 &&
                        text.find_first_not_of("0123456789") == std::string::npos;
    if (!digits)
      throw SpecError(std::string("it has no ") + label);
    return std::stoi(text);
  };
  AttentionSpec spec;
  spec.head_dim = number("head_dim");
  spec.dtype = parse_dtype(key["dtype"]);
  spec.causal = parse_causal(key["causal"]);
  spec.granularity = parse_granularity(key["granularity"]);
  spec.precision = parse_precision(key["precision"]);
  spec.smooth_k = key["smooth_k"] == "yes";
  spec.rotate = key["rotate"] == "yes";
  spec.deterministic = key["deterministic"] == "yes";
  spec.group_q = number("group_q");
  spec.group_kv = number("group_kv");
  const Pass pass = key["pass"] == to_string(Pass::forward) ? Pass::forward : Pass::backward;
  const TileConfig tile = parse_tile(record.tile);
  // The generator's own list knows what a kernel does not depend on.
  for (KernelSpec& kernel : kernels_of(pass, spec, find_arch(key["arch"]), Tiles{tile, tile, tile}))
    if (to_string(kernel.kind) == key["kind"]) {
      check_tile(kernel);
      return kernel;
    }
  throw SpecError("its kernel '" + key["kind"] + "' is none of the operation's");
}

/// What stays of a kernel when its tile does not matter.
std::string untiled(KernelSpec kernel) {
  kernel.tile = {};
  return identity_of(kernel);
}

/// Whether this version would look for the record: its key holds the source of the default tile.
bool is_current(const TuningRecord& record, KernelSpec kernel) {
  kernel.tile = default_tile(kernel.kind, kernel.attention, kernel.arch);
  return record.key["source"] == sha256_hex(emit(kernel).text);
}

std::map<std::string, KernelSpec> default_kernels(const std::vector<WantedOperation>& operations) {
  std::map<std::string, KernelSpec> kernels;
  for (const WantedOperation& operation : operations)
    for (Pass pass : {Pass::forward, Pass::backward})
      if (pass == Pass::forward ? operation.forward : operation.backward)
        for (const KernelSpec& kernel : kernels_of(pass, operation.spec, operation.arch))
          kernels.emplace(identity_of(kernel), kernel);
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

/// Raises LibraryError without an NVRTC that knows all architectures: better now than after
/// minutes.
std::string nvrtc_for(const std::vector<KernelSpec>& kernels) {
  Nvrtc& nvrtc = Nvrtc::instance();
  std::set<std::string_view> seen;
  for (const KernelSpec& kernel : kernels)
    if (seen.insert(kernel.arch.name).second)
      nvrtc.compile("nothing", "extern \"C\" __global__ void nothing() {}", kernel.arch.name);
  return nvrtc.identity();
}

/// A pack holds only what is sound, whatever this process may run for itself.
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

/// Builds on `width` threads; reports on the calling one. Returns what failed with a CompileError;
/// any other error ends the work and is raised.
class ParallelBuild {
public:
  ParallelBuild(KernelBuilder& builder, const PrebuildRequest& request,
                const std::vector<KernelSpec>& kernels)
      : builder_(builder), request_(request), kernels_(kernels), built(kernels.size()) {}

  void run(size_t width) {
    std::vector<std::thread> workers;
    try {
      for (size_t i = 0; i < width; ++i)
        workers.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (workers.empty())
        throw;
      // No more threads to be had: those there are do the work.
    }
    try {
      report();
    } catch (...) {
      fatal(std::current_exception());
    }
    for (std::thread& worker : workers)
      worker.join();
    if (fatal_)
      std::rethrow_exception(fatal_);
  }

private:
  KernelBuilder& builder_;
  const PrebuildRequest& request_;
  const std::vector<KernelSpec>& kernels_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_; ///< of what follows
  std::condition_variable changed_;
  std::deque<Built> news_;
  size_t done_ = 0; ///< built or failed
  std::exception_ptr fatal_;

public:
  std::vector<Built> built; ///< in the kernels' order; empty where it failed
  std::map<size_t, CompileError> failures;

private:
  void work() {
    for (size_t i; !stop_ && (i = next_++) < kernels_.size();)
      try {
        built[i] = builder_.build(kernels_[i]);
        std::lock_guard lock(mutex_);
        news_.push_back(built[i]);
        ++done_;
        changed_.notify_one();
      } catch (const CompileError& error) { // the others are wanted all the same
        std::lock_guard lock(mutex_);
        failures.emplace(i, error);
        ++done_;
        changed_.notify_one();
      } catch (...) {
        fatal(std::current_exception());
      }
  }

  void fatal(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    stop_ = true;
    if (!fatal_)
      fatal_ = error;
    changed_.notify_one();
  }

  void report() {
    for (size_t reported = 0;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !news_.empty() || done_ == kernels_.size() || fatal_; });
      if (fatal_ || news_.empty())
        return;
      const Built kernel = std::move(news_.front());
      news_.pop_front();
      lock.unlock();
      if (request_.progress)
        request_.progress(*kernel, ++reported, kernels_.size());
    }
  }
};

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
  options.if_not_kept = "If this prebuild is interrupted, the next one begins anew.";
  CacheStore store(options);
  KernelBuilder::Policy policy;
  policy.accept = [&](const CacheEntry& entry) { return entry.compiler == compiler; };
  KernelBuilder builder(store, request.emit, sound(request.compile), policy);

  PrebuildResult result;
  result.threads = std::max<size_t>(1, std::min(kernels.size(), compile_width()));
  ParallelBuild build(builder, request, kernels);
  build.run(result.threads);
  if (!build.failures.empty())
    raise_failures(build.failures, kernels.size(), request);

  std::vector<std::string> items;
  for (const Built& kernel : build.built)
    items.push_back(serialize(key_of(request.emit(kernel->spec), kernel->spec), kernel->entry));
  for (const TuningRecord& record : request.records)
    items.push_back(serialize(record));
  result.pack_bytes = write_pack(request.output, items);
  folder.remove();
  result.kernels = std::move(build.built);
  result.records = request.records.size();
  return result;
}

} // namespace sagebwd
