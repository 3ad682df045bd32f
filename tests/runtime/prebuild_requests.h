//===- prebuild_requests.h - What tests of prebuilding ask for -------------===//
#pragma once

#include "generator/choice.h"
#include "generator/emit.h"
#include "generator/space.h"
#include "runtime/prebuild.h"
#include "runtime/tuner/records.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <unistd.h>

namespace sagebwd::test {

inline WantedOperation operation(const char* arch = "sm_80", int head_dim = 64,
                                 Causal causal = Causal::none) {
  WantedOperation operation{{}, find_arch(arch)};
  operation.spec.head_dim = head_dim;
  operation.spec.causal = causal;
  return operation;
}

inline std::vector<WantedOperation> some_operations() {
  return {operation("sm_80", 64), operation("sm_90a", 128),
          operation("sm_80", 64, Causal::top_left)};
}

/// Names itself, counts, and fails for what it is told to.
struct StandIn {
  std::string name = "stand-in 1";
  std::atomic<int> compiles{0};
  std::string fails_for = "";
  useconds_t pause_us = 0;

  KernelBuilder::Compiled operator()(const KernelSource& source, const KernelSpec& spec) {
    ++compiles;
    if (pause_us)
      ::usleep(pause_us);
    if (!fails_for.empty() && source.name.find(fails_for) != std::string::npos)
      throw CompileError("no " + source.name, "a log", "1 source");
    CacheEntry entry;
    entry.kernel_name = source.name;
    entry.arch = spec.arch.name;
    entry.compiler = name;
    entry.lowest_driver = spec.arch.first_cuda;
    entry.compile_ms = compiles; // never kept
    entry.cubin = source.text;
    return {entry, /*keep=*/true};
  }
};

inline PrebuildRequest request_for(const std::string& output, std::vector<KernelSpec> kernels,
                                   StandIn& compiler) {
  PrebuildRequest request;
  request.output = output;
  request.kernels = std::move(kernels);
  request.compile = [&](const KernelSource& source, const KernelSpec& spec) {
    return compiler(source, spec);
  };
  request.compiler = [&] { return compiler.name; };
  return request;
}

inline TuningRecord record_of(const WantedOperation& operation, KernelKind kind,
                              const TileConfig& tile) {
  const ResolvedSpec spec = resolved(operation.spec);
  TuningRecord record;
  record.key = record_key(kind, spec, {"NVIDIA X", 132, operation.arch, "13.0"}, Bucket());
  record.tile = to_string(tile);
  record.default_tile = to_string(default_tile(kind, spec, operation.arch));
  return record;
}

inline std::string message_of(const std::function<void()>& attempt) {
  try {
    attempt();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Kernels of equal fields are one, whichever spec they are listed under.
inline bool same(const KernelSpec& a, const KernelSpec& b) {
  return a.arch == b.arch && labelled(a) == labelled(b);
}
inline long count_of(const std::vector<KernelSpec>& kernels, const KernelSpec& wanted) {
  return std::count_if(kernels.begin(), kernels.end(),
                       [&](const KernelSpec& kernel) { return same(kernel, wanted); });
}

} // namespace sagebwd::test
