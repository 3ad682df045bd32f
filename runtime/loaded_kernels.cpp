//===- loaded_kernels.cpp - All loaded kernels of the process -------------===//

#include "runtime/loaded_kernels.h"

#include "runtime/kernel_builder.h"

#include <map>
#include <mutex>
#include <unordered_map>

namespace sagebwd {
namespace {

/// No AtFork entry is needed: in a forked child the driver refuses to work.
std::mutex mutex;
/// The key is the device. The map is never destroyed, because threads may still launch while the
/// process ends.
std::map<int, std::unordered_map<KernelSpec, LoadedKernel, KernelSpecHash>>& loaded =
    *new std::map<int, std::unordered_map<KernelSpec, LoadedKernel, KernelSpecHash>>;

} // namespace

std::optional<LoadedKernel> find_loaded(const KernelSpec& spec, int device) {
  const std::lock_guard lock(mutex);
  const auto& of_device = loaded[device];
  const auto found = of_device.find(spec);
  return found == of_device.end() ? std::nullopt : std::optional(found->second);
}

LoadedKernel load_once(const BuiltKernel& built, int device) {
  const std::lock_guard lock(mutex);
  auto& of_device = loaded[device];
  auto found = of_device.find(built.spec);
  if (found == of_device.end())
    found =
        of_device
            .emplace(built.spec, load_kernel(built.spec, built.entry.kernel_name, built.entry.cubin,
                                             built.threads, built.shared_bytes))
            .first;
  return found->second;
}

} // namespace sagebwd
