//===- driver.cpp - The CUDA driver ---------------------------------------===//

#include "runtime/driver/driver.h"
#include "runtime/driver/library.h"

#include "llvm/ADT/StringExtras.h"

#include <atomic>
#include <bit>
#include <mutex>
#include <vector>

namespace sagebwd::driver {

namespace {

// CUdevice_attribute
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kMaxSharedMemoryPerBlockOptin = 97;
// CUfunction_attribute
constexpr int kMaxDynamicSharedSizeBytes = 8;
// CUstream_flags
constexpr unsigned kNonBlocking = 1;
// CUresult values: this driver or GPU does not support a cubin.
constexpr Result kInvalidImage = 200;
constexpr Result kNoBinaryForGpu = 209;
constexpr Result kUnsupportedPtxVersion = 222;
/// The null stream was asked while a stream that it waits for is being captured.
constexpr Result kCaptureImplicit = 906;

void check_ordinal(int ordinal) {
  const Library& cuda = library();
  if (ordinal < 0 || ordinal >= cuda.devices)
    throw DriverError("there is no GPU " + std::to_string(ordinal) + ": this process sees " +
                          std::to_string(cuda.devices) + ", numbered from 0",
                      /*CUDA_ERROR_INVALID_DEVICE=*/101);
}

Device device_of(int ordinal) {
  check_ordinal(ordinal);
  Device device = 0;
  library().cuDeviceGet(&device, ordinal);
  return device;
}

int attribute(Device device, int which) {
  int value = 0;
  library().cuDeviceGetAttribute(&value, which, device);
  return value;
}

/// The primary context of a device, which is retained on first use and never released. Frameworks
/// use the same context.
Context primary_context(int ordinal) {
  static std::mutex mutex;
  static std::vector<Context>& contexts = *new std::vector<Context>(library().devices, nullptr);
  check_ordinal(ordinal);
  std::lock_guard lock(mutex);
  if (!contexts[ordinal])
    library().cuDevicePrimaryCtxRetain(&contexts[ordinal], device_of(ordinal));
  return contexts[ordinal];
}

/// Formats a UUID as nvidia-smi prints it.
std::string uuid_text(const unsigned char (&bytes)[16]) {
  std::string text = llvm::toHex(llvm::ArrayRef<uint8_t>(bytes), /*LowerCase=*/true);
  for (size_t dash : {20, 16, 12, 8})
    text.insert(dash, 1, '-');
  return "GPU-" + text;
}

std::atomic<size_t> modules{0};

} // namespace

const std::string& unavailable() { return table().unavailable; }

int device_count() { return library().devices; }

int driver_version() {
  int version = 0;
  table().cuDriverGetVersion(&version);
  return version;
}

DeviceInfo device_info(int ordinal) {
  const Library& cuda = library();
  Device device = device_of(ordinal);
  DeviceInfo info;
  char name[256] = {};
  cuda.cuDeviceGetName(name, sizeof(name) - 1, device);
  info.name = name;
  if (unsigned char uuid[16] = {}; cuda.cuDeviceGetUuid.address) {
    cuda.cuDeviceGetUuid(uuid, device);
    info.uuid = uuid_text(uuid);
  }
  info.major = attribute(device, kComputeCapabilityMajor);
  info.minor = attribute(device, kComputeCapabilityMinor);
  info.sm_count = attribute(device, kMultiprocessorCount);
  info.max_shared_bytes = attribute(device, kMaxSharedMemoryPerBlockOptin);
  cuda.cuDeviceTotalMem(&info.memory_bytes, device);
  return info;
}

DeviceScope::DeviceScope(int ordinal) { library().cuCtxPushCurrent(primary_context(ordinal)); }

/// Calls a function that destructors call. They cannot report errors, and after a kernel has failed
/// every call of the driver fails: that error is on its way already. The driver is open, for it has
/// made whatever is released.
template <class... Args, class... Given>
static void call_quietly(const FunctionOf<Args...>& function, Given... given) {
  if (function.address)
    function.address(given...);
}

DeviceScope::~DeviceScope() {
  Context popped = nullptr;
  call_quietly(table().cuCtxPopCurrent, &popped);
}

size_t loaded_modules() { return modules; }

Module load_module(const std::string& cubin) {
  const Library& cuda = library();
  Module module = nullptr;
  Result result = cuda.cuModuleLoadData.call(&module, cubin.data());
  if (result == kSuccess) {
    ++modules;
    return module;
  }
  try {
    raise_failed("cuModuleLoadData", result);
  } catch (const DriverError& error) {
    if (result != kInvalidImage && result != kNoBinaryForGpu && result != kUnsupportedPtxVersion)
      throw;
    throw DriverError(std::string(error.what()) +
                          ". The kernel was compiled for another GPU, or by a newer CUDA major "
                          "version than the driver's (" +
                          std::to_string(driver_version() / 1000) +
                          "): compile with that version's NVRTC (SAGEBWD_NVRTC).",
                      result);
  }
}

Function get_function(Module module, const std::string& name) {
  Function function = nullptr;
  library().cuModuleGetFunction(&function, module, name.c_str());
  return function;
}

void set_max_dynamic_shared(Function function, int bytes) {
  library().cuFuncSetAttribute(function, kMaxDynamicSharedSizeBytes, bytes);
}

void launch(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
            unsigned shared_bytes, Stream stream, void* params, bool overlaps) {
  constexpr LaunchAttribute kProgrammaticStreamSerialization = {6, {1}};
  const LaunchConfig config = {
      {grid_x, grid_y, grid_z},          {threads, 1, 1},   shared_bytes, stream,
      &kProgrammaticStreamSerialization, overlaps ? 1u : 0u};
  void* arguments[] = {params};
  library().cuLaunchKernelEx(&config, function, arguments, nullptr);
}

void encode_tensor_map(void* map, uint64_t address, const uint64_t (&sizes)[4],
                       const uint64_t (&strides)[3], const uint32_t (&box)[2]) {
  constexpr int kUint16 = 1, kNotInterleaved = 0, kSwizzle128 = 3, kPromoteTo256 = 3, kZeros = 0;
  const uint32_t extents[] = {box[0], box[1], 1, 1}, steps[] = {1, 1, 1, 1};
  library().cuTensorMapEncodeTiled(map, kUint16, 4, reinterpret_cast<void*>(address), sizes,
                                   strides, extents, steps, kNotInterleaved, kSwizzle128,
                                   kPromoteTo256, kZeros);
}

bool is_capturing(Stream stream) {
  int status = 0; // CU_STREAM_CAPTURE_STATUS_NONE
  const Library& cuda = library();
  const Result result = cuda.cuStreamIsCapturing.call(stream, &status);
  if (result == kSuccess)
    return status != 0;
  try {
    raise_failed("cuStreamIsCapturing", result);
  } catch (const DriverError& error) {
    if (result != kCaptureImplicit)
      throw;
    throw DriverError(std::string(error.what()) +
                          ". Another stream of this process is being captured into a CUDA graph, "
                          "and the null stream would wait for it: warm up and use the null stream "
                          "before or after captures, or pass a stream of your own",
                      result);
  }
}

Pointer allocate(size_t bytes) {
  Pointer pointer = 0;
  library().cuMemAlloc(&pointer, bytes);
  return pointer;
}

void release(Pointer pointer) { call_quietly(table().cuMemFree, pointer); }

void copy_to_device(Pointer to, const void* from, size_t bytes) {
  library().cuMemcpyHtoD(to, from, bytes);
}

void copy_to_host(void* to, Pointer from, size_t bytes) { library().cuMemcpyDtoH(to, from, bytes); }

void fill(Pointer to, uint8_t value, size_t bytes) { library().cuMemsetD8(to, value, bytes); }

void fill(Pointer to, float value, size_t count, Stream stream) {
  library().cuMemsetD32Async(to, std::bit_cast<unsigned>(value), count, stream);
}

void synchronize() { library().cuCtxSynchronize(); }

Event create_event() {
  Event event = nullptr;
  library().cuEventCreate(&event, 0);
  return event;
}

void destroy_event(Event event) { call_quietly(table().cuEventDestroy, event); }

void record(Event event, Stream stream) { library().cuEventRecord(event, stream); }

float elapsed_ms(Event start, Event stop) {
  float ms = 0;
  library().cuEventSynchronize(stop);
  library().cuEventElapsedTime(&ms, start, stop);
  return ms;
}

Stream create_stream() {
  Stream stream = nullptr;
  library().cuStreamCreate(&stream, kNonBlocking);
  return stream;
}

void destroy_stream(Stream stream) { call_quietly(table().cuStreamDestroy, stream); }

void synchronize(Stream stream) { library().cuStreamSynchronize(stream); }

} // namespace sagebwd::driver
