//===- libcuda.cpp - A driver whose GPU is the CPU --------------------------===//
//
// The functions that runtime/driver/library.h knows, in the versions it declares. A "cubin" is a
// shared library that libnvrtc.cpp has compiled. Launches are done when they return; what went
// wrong in one is the text of error 719. From the environment:
//   SIMULATOR_CAPABILITY  compute capability of the GPU, 9.0 unless given
//   SIMULATOR_SEED        an order in which warps, lanes and asynchronous work run; 0: a fixed one
//
//===----------------------------------------------------------------------===//

#include "tests/simulator/block.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace {

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidImage = 200,
                 kNotFound = 500, kLaunchFailed = 719;
constexpr size_t kPageBytes = 4096, kMemoryBytes = size_t(8) << 30;

std::string launch_error;

struct Capability {
  int major = 9, minor = 0;
  Capability() {
    if (const char* given = std::getenv("SIMULATOR_CAPABILITY"))
      std::sscanf(given, "%d.%d", &major, &minor);
  }
  int shared_bytes_a_block() const {
    const int number = major * 10 + minor;
    return (number == 80 || number == 87                    ? 163
            : number == 86 || number == 89 || number >= 120 ? 99
                                                            : 227)
           << 10;
  }
};
const Capability& capability() {
  static const Capability capability;
  return capability;
}

/// This is CUlaunchConfig. None of its attributes changes what a launch that runs alone does.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const void* attributes;
  unsigned attribute_count;
};

/// A loaded library, which holds one kernel.
struct Module {
  void* library;
  size_t shared_bytes; ///< static and dynamic: all its thread-local memory

  template <class Function> Function find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library, name));
  }
  /// Gives the calling thread's memory, which begins where its thread-local variables do.
  std::span<char> shared_memory() const {
    find<void* (*)()>("simulator_shared_memory")();
    void* begin = nullptr;
    dlinfo(library, RTLD_DI_TLS_DATA, &begin);
    return {static_cast<char*>(begin), shared_bytes};
  }
};

/// Allocations end where a page begins that nobody may touch, up to the alignment of 256 bytes.
class Memory {
public:
  uint64_t allocate(size_t bytes) {
    const size_t rounded = (bytes + 255) / 256 * 256;
    const size_t pages = (rounded + kPageBytes - 1) / kPageBytes * kPageBytes;
    char* begin = static_cast<char*>(mmap(nullptr, pages + 2 * kPageBytes, PROT_NONE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (begin == MAP_FAILED || mprotect(begin + kPageBytes, pages, PROT_READ | PROT_WRITE) != 0)
      return 0;
    std::memset(begin + kPageBytes, 0xff, pages);
    const auto address = reinterpret_cast<uint64_t>(begin + kPageBytes + pages - rounded);
    std::lock_guard lock(mutex_);
    places_[address] = {begin, pages + 2 * kPageBytes};
    return address;
  }
  bool release(uint64_t address) {
    std::lock_guard lock(mutex_);
    const auto found = places_.find(address);
    if (found == places_.end())
      return false;
    munmap(found->second.first, found->second.second);
    places_.erase(found);
    return true;
  }

private:
  std::mutex mutex_;
  std::map<uint64_t, std::pair<char*, size_t>> places_;
};
Memory& memory() {
  static Memory& memory = *new Memory;
  return memory;
}

using Clock = std::chrono::steady_clock;

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default"))) Result

EXPORTED cuInit(unsigned) { return kSuccess; }
EXPORTED cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
EXPORTED cuGetErrorName(Result error, const char** name) {
  return *name = error == kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR", kSuccess;
}
EXPORTED cuGetErrorString(Result error, const char** text) {
  return *text = error == kLaunchFailed ? launch_error.c_str() : "of the simulator", kSuccess;
}
EXPORTED cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
EXPORTED cuDeviceGet(int* device, int) { return *device = 0, kSuccess; }
EXPORTED cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, size, "simulated GPU %d.%d", capability().major, capability().minor);
  return kSuccess;
}
EXPORTED cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16   ? 4 // multiprocessors
           : attribute == 75 ? capability().major
           : attribute == 76 ? capability().minor
           : attribute == 97 ? capability().shared_bytes_a_block()
                             : 0;
  return kSuccess;
}
EXPORTED cuDeviceGetUuid_v2(unsigned char* uuid, int) {
  return std::memset(uuid, 0x51, 16), kSuccess;
}
EXPORTED cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = kMemoryBytes, kSuccess; }
EXPORTED cuDevicePrimaryCtxRetain(void** context, int) { return *context = &memory(), kSuccess; }
EXPORTED cuCtxPushCurrent_v2(void*) { return kSuccess; }
EXPORTED cuCtxPopCurrent_v2(void** context) { return *context = &memory(), kSuccess; }
EXPORTED cuCtxSynchronize() { return kSuccess; }

EXPORTED cuModuleLoadData(void** module, const void* image) {
  const auto& header = *static_cast<const Elf64_Ehdr*>(image);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_type != ET_DYN)
    return kInvalidImage;
  std::string path = std::filesystem::temp_directory_path() / "sagebwd-simulated-XXXXXX";
  const int file = mkstemp(path.data());
  const size_t bytes = header.e_shoff + size_t(header.e_shnum) * header.e_shentsize;
  const bool written = write(file, image, bytes) == static_cast<ssize_t>(bytes);
  close(file);
  void* library = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path.c_str());
  if (!library)
    return kInvalidImage;
  size_t shared_bytes = 0;
  const auto* segments =
      reinterpret_cast<const Elf64_Phdr*>(static_cast<const char*>(image) + header.e_phoff);
  for (int i = 0; i < header.e_phnum; ++i)
    if (segments[i].p_type == PT_TLS)
      shared_bytes = segments[i].p_memsz;
  *module = new Module{library, shared_bytes};
  return kSuccess;
}
EXPORTED cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = module;
  return static_cast<Module*>(module)->find<void*>(name) ? kSuccess : kNotFound;
}
EXPORTED cuFuncSetAttribute(void*, int, int) { return kSuccess; }
/// Gives the registers that ptxas may use where a kernel says how many of its blocks run on a
/// multiprocessor.
static int registers_a_thread(const Module& module, unsigned threads) {
  const int* bounds = module.find<const int*>("simulator_launch_bounds");
  const int blocks = bounds && bounds[1] > 0 ? bounds[1] : 1;
  return std::min(248, 65536 / (blocks * static_cast<int>(threads)) / 8 * 8);
}
EXPORTED cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void**) {
  const auto& module = *static_cast<Module*>(function);
  if (config->shared_bytes > module.shared_bytes)
    return kInvalidValue;
  const unsigned threads = config->block[0];
  const char* seed = std::getenv("SIMULATOR_SEED");
  launch_error = simulator::run({module.find<void (*)(const void*)>("simulator_launch"),
                                 params[0],
                                 {config->grid[0], config->grid[1], config->grid[2]},
                                 threads,
                                 registers_a_thread(module, threads),
                                 [&] { return module.shared_memory(); },
                                 seed ? std::strtoull(seed, nullptr, 10) : 0});
  return launch_error.empty() ? kSuccess : kLaunchFailed;
}
/// Takes less than the driver: 4 dimensions, elements of 1 or 2 bytes, rows as long as the swizzle.
EXPORTED cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address,
                                const uint64_t* extents, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* element_strides,
                                int interleave, int swizzle, int, int fill) {
  constexpr unsigned kElementBytes[] = {1, 2, 0, 0, 0, 0, 2, 0, 0, 2}; // u8, u16, fp16, bf16
  constexpr unsigned kSwizzleBytes[] = {0, 32, 64, 128};
  constexpr size_t kMapBytes = 128;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 ||
      reinterpret_cast<uintptr_t>(address) % 16 != 0 || type < 0 || type > 9 ||
      kElementBytes[type] == 0 || rank != 4 || interleave != 0 ||
      (swizzle != 0 && swizzle != 2 && swizzle != 3) || fill != 0)
    return kInvalidValue;
  simulator::Tensor tensor{simulator::Tensor::kMark,
                           kElementBytes[type],
                           kSwizzleBytes[swizzle],
                           static_cast<const char*>(address),
                           {},
                           {},
                           {}};
  for (int i = 0; i < 4; ++i) {
    if (extents[i] < 1 || extents[i] > 0xffffffff || box[i] < 1 || box[i] > 256 ||
        element_strides[i] != 1 || (i < 3 && (strides[i] % 16 != 0 || strides[i] >> 40 != 0)))
      return kInvalidValue;
    tensor.extents[i] = static_cast<unsigned>(extents[i]);
    tensor.box[i] = box[i];
    if (i < 3)
      tensor.strides[i] = strides[i];
  }
  const unsigned row = box[0] * tensor.element_bytes;
  if (row % 16 != 0 || (tensor.swizzle != 0 && row != tensor.swizzle))
    return kInvalidValue;
  std::memset(map, 0, kMapBytes);
  std::memcpy(map, &tensor, sizeof(tensor));
  return kSuccess;
}
EXPORTED cuStreamIsCapturing(void*, int* status) { return *status = 0, kSuccess; }

EXPORTED cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  *pointer = bytes <= kMemoryBytes ? memory().allocate(bytes) : 0;
  return *pointer ? kSuccess : kOutOfMemory;
}
EXPORTED cuMemFree_v2(uint64_t pointer) {
  return pointer == 0 || memory().release(pointer) ? kSuccess : kInvalidValue;
}
EXPORTED cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), kSuccess;
}
EXPORTED cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), kSuccess;
}
EXPORTED cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) {
  return std::memset(reinterpret_cast<void*>(to), value, count), kSuccess;
}

EXPORTED cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void*) {
  return std::fill_n(reinterpret_cast<unsigned*>(to), count, value), kSuccess;
}

EXPORTED cuEventCreate(void** event, unsigned) { return *event = new Clock::time_point, kSuccess; }
EXPORTED cuEventDestroy_v2(void* event) {
  return delete static_cast<Clock::time_point*>(event), kSuccess;
}
EXPORTED cuEventRecord(void* event, void*) {
  return *static_cast<Clock::time_point*>(event) = Clock::now(), kSuccess;
}
EXPORTED cuEventSynchronize(void*) { return kSuccess; }
EXPORTED cuEventElapsedTime(float* ms, void* start, void* stop) {
  const auto at = [](void* event) { return *static_cast<Clock::time_point*>(event); };
  *ms = std::chrono::duration<float, std::milli>(at(stop) - at(start)).count();
  return kSuccess;
}
EXPORTED cuStreamCreate(void** stream, unsigned) { return *stream = &memory(), kSuccess; }
EXPORTED cuStreamDestroy_v2(void*) { return kSuccess; }
EXPORTED cuStreamSynchronize(void*) { return kSuccess; }
