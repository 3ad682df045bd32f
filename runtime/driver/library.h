//===- library.h - The table of driver functions --------------------------===//
//
// This header is internal to runtime/driver. Each function is looked up once, at the version whose
// signature is declared here (as cudaTypedefs.h names it). If a function is missing, only calling
// it is an error.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/driver/driver.h"

namespace sagebwd::driver {

using Result = int; // CUresult
constexpr Result kSuccess = 0;

/// These structs mirror CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  alignas(8) int value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

// Each line has a name, the CUDA version that introduced this signature, the exported symbol, and
// the parameters.
#define SAGEBWD_DRIVER_FUNCTIONS(X)                                                                \
  X(cuInit, 2000, "cuInit", unsigned)                                                              \
  X(cuDriverGetVersion, 2020, "cuDriverGetVersion", int*)                                          \
  X(cuGetErrorName, 6000, "cuGetErrorName", Result, const char**)                                  \
  X(cuGetErrorString, 6000, "cuGetErrorString", Result, const char**)                              \
  X(cuDeviceGetCount, 2000, "cuDeviceGetCount", int*)                                              \
  X(cuDeviceGet, 2000, "cuDeviceGet", Device*, int)                                                \
  X(cuDeviceGetName, 2000, "cuDeviceGetName", char*, int, Device)                                  \
  X(cuDeviceGetAttribute, 2000, "cuDeviceGetAttribute", int*, int, Device)                         \
  X(cuDeviceGetUuid, 11040, "cuDeviceGetUuid_v2", unsigned char*, Device)                          \
  X(cuDeviceTotalMem, 3020, "cuDeviceTotalMem_v2", size_t*, Device)                                \
  X(cuDevicePrimaryCtxRetain, 7000, "cuDevicePrimaryCtxRetain", Context*, Device)                  \
  X(cuCtxPushCurrent, 4000, "cuCtxPushCurrent_v2", Context)                                        \
  X(cuCtxPopCurrent, 4000, "cuCtxPopCurrent_v2", Context*)                                         \
  X(cuCtxSynchronize, 2000, "cuCtxSynchronize")                                                    \
  X(cuModuleLoadData, 2000, "cuModuleLoadData", Module*, const void*)                              \
  X(cuModuleGetFunction, 2000, "cuModuleGetFunction", Function*, Module, const char*)              \
  X(cuFuncSetAttribute, 9000, "cuFuncSetAttribute", Function, int, int)                            \
  X(cuLaunchKernelEx, 11060, "cuLaunchKernelEx", const LaunchConfig*, Function, void**, void**)    \
  X(cuTensorMapEncodeTiled, 12000, "cuTensorMapEncodeTiled", void*, int, uint32_t, void*,          \
    const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int)        \
  X(cuStreamIsCapturing, 10000, "cuStreamIsCapturing", Stream, int*)                               \
  X(cuMemAlloc, 3020, "cuMemAlloc_v2", Pointer*, size_t)                                           \
  X(cuMemFree, 3020, "cuMemFree_v2", Pointer)                                                      \
  X(cuMemcpyHtoD, 3020, "cuMemcpyHtoD_v2", Pointer, const void*, size_t)                           \
  X(cuMemcpyDtoH, 3020, "cuMemcpyDtoH_v2", void*, Pointer, size_t)                                 \
  X(cuMemsetD8, 3020, "cuMemsetD8_v2", Pointer, unsigned char, size_t)                             \
  X(cuMemsetD32Async, 3020, "cuMemsetD32Async", Pointer, unsigned, size_t, Stream)                 \
  X(cuEventCreate, 2000, "cuEventCreate", Event*, unsigned)                                        \
  X(cuEventDestroy, 4000, "cuEventDestroy_v2", Event)                                              \
  X(cuEventRecord, 2000, "cuEventRecord", Event, Stream)                                           \
  X(cuEventSynchronize, 2000, "cuEventSynchronize", Event)                                         \
  X(cuEventElapsedTime, 2000, "cuEventElapsedTime", float*, Event, Event)                          \
  X(cuStreamCreate, 2000, "cuStreamCreate", Stream*, unsigned)                                     \
  X(cuStreamDestroy, 4000, "cuStreamDestroy_v2", Stream)                                           \
  X(cuStreamSynchronize, 2000, "cuStreamSynchronize", Stream)

/// Raises LibraryError, because the driver has no such function.
[[noreturn]] void raise_missing(const char* name, int since);
/// Raises DriverError for the result of a call.
[[noreturn]] void raise_failed(const char* name, Result);

template <class... Args> struct FunctionOf {
  const char* name;
  int since;
  Result (*address)(Args...) = nullptr;

  /// Calls the function and returns the driver's result.
  Result call(Args... args) const {
    if (!address)
      raise_missing(name, since);
    return address(args...);
  }
  /// Calls the function and raises DriverError unless the result is success.
  void operator()(Args... args) const {
    if (Result result = call(args...); result != kSuccess)
      raise_failed(name, result);
  }
};

struct Library {
#define X(name, since, symbol, ...) FunctionOf<__VA_ARGS__> name{#name, since};
  SAGEBWD_DRIVER_FUNCTIONS(X)
#undef X
  std::string unavailable; ///< why there is no usable driver or GPU
  bool present = false;    ///< libcuda is loaded
  int devices = 0;

  Library();
};

/// The table, for functions that must work without a GPU.
const Library& table();
/// The table of a driver with at least one GPU; raises LibraryError if there is none.
const Library& library();

} // namespace sagebwd::driver
