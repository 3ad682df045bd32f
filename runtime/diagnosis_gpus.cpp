//===- diagnosis_gpus.cpp - The GPUs of this machine, and what they need --===//

#include "runtime/diagnosis_gpus.h"

#include "runtime/nvrtc/nvrtc.h"

#include "llvm/ADT/STLExtras.h"

#include <algorithm>

namespace sagebwd {
namespace {

/// The first supported CUDA version: NVRTC 11 is refused, so no kernel is older.
constexpr int kFirstCuda = 12;

} // namespace

std::string CompilerState::why_not(const Arch& arch) const {
  return error.empty() ? Nvrtc::instance().why_not(arch.name) : error;
}

CompilerState look_for_compiler() {
  CompilerState found;
  found.error = error_of([&] {
    Nvrtc& nvrtc = Nvrtc::instance();
    found = {nvrtc.path(), nvrtc.identity(), "", nvrtc.version_major(), nvrtc.supported_archs()};
  });
  return found;
}

std::vector<GpuState> look_for_gpus() {
  std::vector<GpuState> gpus;
  const int count = driver::unavailable().empty() ? driver::device_count() : 0;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    GpuState& gpu = gpus.emplace_back();
    gpu.info = driver::device_info(ordinal);
    gpu.error =
        error_of([&] { gpu.arch = arch_for_capability(gpu.info.major, gpu.info.minor).name; });
  }
  return gpus;
}

std::vector<Missing> missing_for_gpus(const std::vector<GpuState>& gpus,
                                      const CompilerState& compiler) {
  std::vector<Missing> missing;
  for (size_t i = 0; i < gpus.size(); ++i)
    if (!gpus[i].error.empty())
      missing.push_back({"a supported GPU in place of gpu " + std::to_string(i) + ", " +
                             gpus[i].info.name + ": " + gpus[i].error,
                         "running kernels on it",
                         "use another GPU; emit, trace --device cpu and, where compiling is "
                         "allowed, build work without"});
  for (const Arch& arch : all_archs())
    if (compiler.error.empty() && !compiler.why_not(arch).empty() &&
        llvm::any_of(gpus, [&](const GpuState& gpu) { return gpu.arch == arch.name; }))
      missing.push_back(
          {"an NVRTC for this GPU: " + compiler.why_not(arch),
           "compiling kernels for " + std::string(arch.name),
           "pip install nvidia-cuda-nvrtc, or set SAGEBWD_NVRTC to a newer libnvrtc.so"});
  if (!driver::unavailable().empty()) {
    missing.push_back(
        {"a CUDA driver with a GPU",
         "running kernels (verify, trace --device cuda, attention itself)",
         "install NVIDIA's driver on a machine with a GPU; emit, build and trace --device cpu work "
         "without"});
    return missing;
  }
  const int major = driver::driver_version() / 1000;
  const std::string number = std::to_string(major),
                    here = " (this one is for CUDA " +
                           driver::version_text(driver::driver_version()) + ")";
  if (major < kFirstCuda)
    missing.push_back({"a driver for CUDA " + std::to_string(kFirstCuda) + " or newer" + here,
                       "running any kernel",
                       "update the driver: no kernel is built for CUDA " + number});
  else if (compiler.version_major > major)
    missing.push_back({"a driver for CUDA " + std::to_string(compiler.version_major) + here,
                       "loading what this NVRTC compiles",
                       "update the driver, or pip install nvidia-cuda-nvrtc-cu" + number +
                           " and point SAGEBWD_NVRTC at its libnvrtc.so." + number});
  return missing;
}

bool runs(const GpuState& gpu, const CompilerState& compiler, const DriverNeeds& kept) {
  if (!gpu.error.empty())
    return false;
  const int version = driver::driver_version();
  const Arch& arch = find_arch(gpu.arch);
  const int compiled = std::max(1000 * compiler.version_major, arch.first_cuda);
  return (compiler.why_not(arch).empty() && compiled <= version) ||
         llvm::any_of(kept, [&](const auto& need) {
           return need.first.first == gpu.arch && need.first.second <= version;
         });
}

} // namespace sagebwd
