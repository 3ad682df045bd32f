//===- loaded_kernels.cpp - All loaded kernels of the process -------------===//

#include "runtime/loaded_kernels.h"

#include "generator/definition.h"
#include "runtime/kernel_builder.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace sagebwd {
namespace {

/// No AtFork entry is needed: in a forked child the driver refuses to work.
std::mutex mutex;
/// The key is the device. The map is never destroyed, because threads may still launch while the
/// process ends.
std::map<int, std::unordered_map<KernelSpec, LoadedKernel, KernelSpecHash>>& loaded =
    *new std::map<int, std::unordered_map<KernelSpec, LoadedKernel, KernelSpecHash>>;

/// The driver takes so much of an SM's shared memory for each block; blocks are given multiples of
/// kSharedUnit.
constexpr int kOfDriver = 1024, kSharedUnit = 128;
std::atomic<int> other_sm_bytes{0}; ///< of live_as_with()

int rounded_up(int bytes) { return (bytes + kSharedUnit - 1) / kSharedUnit * kSharedUnit; }

/// The dynamic shared memory with which a kernel is loaded.
int shared_bytes_of(const BuiltKernel& built, int device) {
  const int other = other_sm_bytes;
  if (other == 0 || built.shared_bytes == 0)
    return built.shared_bytes;
  // The largest block fills an SM.
  return padded_shared_bytes(built.shared_bytes, other,
                             driver::device_info(device).max_shared_bytes + kOfDriver);
}

/// A kernel that both passes launch is one kernel, and a warm-up loads it once.
KernelSpec of_either_pass(KernelSpec spec) {
  const KernelDefinition& definition = definition_of(spec.kind);
  if (!definition.differs_by_pass && !definition.tiling)
    spec.pass = Pass::forward;
  return spec;
}

/// `kernel` as the kernel of the pass that asks for it.
LoadedKernel as_asked(LoadedKernel kernel, const KernelSpec& spec) {
  kernel.spec = spec;
  return kernel;
}

} // namespace

std::optional<LoadedKernel> find_loaded(const KernelSpec& spec, int device) {
  const std::lock_guard lock(mutex);
  const auto& of_device = loaded[device];
  const auto found = of_device.find(of_either_pass(spec));
  if (found == of_device.end())
    return std::nullopt;
  return as_asked(found->second, spec);
}

LoadedKernel load_once(const BuiltKernel& built, int device) {
  const std::lock_guard lock(mutex);
  auto& of_device = loaded[device];
  const KernelSpec spec = of_either_pass(built.spec);
  auto found = of_device.find(spec);
  if (found == of_device.end())
    found = of_device
                .emplace(spec, load_kernel(spec, built.entry.kernel_name, built.entry.cubin,
                                           built.threads, shared_bytes_of(built, device), device))
                .first;
  return as_asked(found->second, built.spec);
}

void live_as_with(int sm_bytes) { other_sm_bytes = sm_bytes; }

int padded_shared_bytes(int bytes, int of_other, int of_this) {
  const int blocks = of_other / (rounded_up(bytes) + kOfDriver);
  if (blocks == 0)
    throw SpecError("a block of " + std::to_string(bytes) + " bytes of shared memory, and " +
                    std::to_string(kOfDriver) + " of the driver, do not fit an SM with " +
                    std::to_string(of_other));
  const int least = of_this / (blocks + 1) + 1 - kOfDriver; // with less one more would fit
  const int most = of_this / blocks - kOfDriver;
  return std::max(bytes, std::min(rounded_up(least), most));
}

} // namespace sagebwd
