//===- library.cpp - The table of driver functions ------------------------===//

#include "runtime/driver/library.h"
#include "runtime/driver/driver.h"

#include <atomic>
#include <dlfcn.h>

namespace sagebwd::driver {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

namespace {

/// WSL keeps libcuda in the second place, which is not in the dynamic linker's path on some
/// systems.
constexpr const char* kPlaces[] = {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"};

/// Calls cuGetProcAddress, which has two signatures: of CUDA 11.3 and of 12.0.
class Resolver {
public:
  explicit Resolver(void* handle) : handle_(handle) {
    load(new_, "cuGetProcAddress_v2");
    load(old_, "cuGetProcAddress");
  }
  void* find(const char* name, int since, const char* symbol) const {
    void* address = nullptr;
    int status = 0;
    if (new_ && new_(name, &address, since, kLegacyStream, &status) == kSuccess && address)
      return address;
    if (!new_ && old_ && old_(name, &address, since, kLegacyStream) == kSuccess && address)
      return address;
    return ::dlsym(handle_, symbol);
  }

private:
  /// The null stream is the legacy stream, as in PyTorch.
  static constexpr uint64_t kLegacyStream = 1; // CU_GET_PROC_ADDRESS_LEGACY_STREAM

  template <class Function> void load(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(::dlsym(handle_, symbol));
  }

  void* handle_;
  Result (*new_)(const char*, void**, int, uint64_t, int*) = nullptr;
  Result (*old_)(const char*, void**, int, uint64_t) = nullptr;
};

std::string error_text(const Library& table, Result result) {
  const char *name = nullptr, *text = nullptr;
  if (table.cuGetErrorName.address)
    table.cuGetErrorName.address(result, &name);
  if (table.cuGetErrorString.address)
    table.cuGetErrorString.address(result, &text);
  return std::string(name ? name : "CUDA error") + " (" + std::to_string(result) + ")" +
         (text ? std::string(": ") + text : "");
}

std::atomic<int> opened_version{0};

} // namespace

Library::Library() {
  void* handle = nullptr;
  std::string tried;
  for (const char* place : kPlaces) {
    if ((handle = ::dlopen(place, RTLD_NOW | RTLD_LOCAL)))
      break;
    const char* message = ::dlerror();
    const std::string why = message ? message : place;
    const std::string absent =
        std::string(place) + ": cannot open shared object file: No such file";
    if (!why.starts_with(absent)) // the file exists but is not usable
      tried += (tried.empty() ? "" : "; ") + why;
  }
  if (!handle) {
    unavailable = "no CUDA driver: " +
                  (tried.empty() ? "the dynamic linker does not find libcuda.so.1"
                                 : "libcuda.so.1 cannot be opened (" + tried + ")") +
                  ". It comes with the NVIDIA driver, not with the CUDA toolkit.";
    return;
  }
  present = true;

  Resolver resolver(handle);
  auto resolve = [&](auto& function, const char* symbol) {
    function.address = reinterpret_cast<decltype(function.address)>(
        resolver.find(function.name, function.since, symbol));
  };
#define X(name, since, symbol, ...) resolve(name, symbol);
  SAGEBWD_DRIVER_FUNCTIONS(X)
#undef X

  if (!cuInit.address || !cuDeviceGetCount.address) {
    unavailable = "libcuda.so.1 has no cuInit or cuDeviceGetCount: it is no CUDA driver.";
    return;
  }
  if (Result result = cuInit.address(0); result != kSuccess)
    unavailable = "the CUDA driver does not start: cuInit: " + error_text(*this, result);
  else if (result = cuDeviceGetCount.address(&devices); result != kSuccess)
    unavailable = "the CUDA driver does not list its GPUs: " + error_text(*this, result);
  else if (devices == 0)
    unavailable = "the CUDA driver sees no GPU; is CUDA_VISIBLE_DEVICES set to hide it?";
  else if (int version = 0; cuDriverGetVersion.address && !cuDriverGetVersion.address(&version))
    opened_version = version;
}

int opened_driver_version() { return opened_version; }

const Library& table() {
  static const Library& library = *new Library; // never destroyed, so that it outlives every thread
  return library;
}

const Library& library() {
  const Library& library = table();
  if (!library.unavailable.empty())
    throw LibraryError(library.unavailable);
  return library;
}

void raise_missing(const char* name, int since) {
  const Library& library = table();
  if (!library.present)
    throw LibraryError(library.unavailable);
  int version = 0;
  if (library.cuDriverGetVersion.address)
    library.cuDriverGetVersion.address(&version);
  throw LibraryError("the CUDA driver (for CUDA " + version_text(version) + ") has no " + name +
                     ", which came with CUDA " + version_text(since) +
                     ". Update the NVIDIA driver.");
}

void raise_failed(const char* name, Result result) {
  throw DriverError(std::string(name) + " failed: " + error_text(table(), result), result);
}

} // namespace sagebwd::driver
