//===- driver.h - The CUDA driver, opened on first use --------------------===//
//
// This is the only header that declares the driver's types. Only the functions at the end, which
// the operation does not use, wait for the device.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/error.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace sagebwd::driver {

using Device = int;
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Pointer = uint64_t;

/// Why there is no usable driver or GPU; empty if there is one. Never throws.
const std::string& unavailable();

int device_count();
int driver_version(); ///< e.g. 13000 for CUDA 13.0
/// The version as text: "12.8" for 12080.
std::string version_text(int cuda_version);
/// The driver's version, or 0 if this process has not opened a usable driver yet. Opens none.
int opened_driver_version();
struct DeviceInfo {
  std::string name;
  /// "GPU-8dd7...", the same in every process; empty with drivers before CUDA 11.4.
  std::string uuid;
  int major = 0, minor = 0;
  int sm_count = 0;
  int max_shared_bytes = 0; ///< per block, the maximum after opting in
  size_t memory_bytes = 0;
};
DeviceInfo device_info(int ordinal);

/// Makes a device's primary context current on this thread while the object lives.
class DeviceScope {
public:
  explicit DeviceScope(int ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
};

Module load_module(const std::string& cubin); ///< loads into the current context
size_t loaded_modules(); ///< the number this process has loaded; none is ever unloaded
Function get_function(Module, const std::string& name);
void set_max_dynamic_shared(Function, int bytes);
/// Launches a kernel on the caller's stream; `params` is the kernel's single by-value struct. If
/// `overlaps`, a kernel on compute capability 9.0 or later may begin before the kernel launched
/// before it has ended: its code waits for the data that it needs (templates/ptx/stream_order.cuh).
void launch(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
            unsigned shared_bytes, Stream, void* params, bool overlaps = false);
bool is_capturing(Stream);
/// Encodes a tensor of 16-bit elements, for copies of boxes of the first two dimensions. A box
/// becomes rows of 128 bytes with the swizzle that wgmma reads; elements outside the tensor become
/// zeros. `map` has 128 bytes and is aligned to 64 bytes. `sizes` begin with the innermost
/// dimension; `strides` are in bytes and leave out the innermost dimension.
void encode_tensor_map(void* map, uint64_t address, const uint64_t (&sizes)[4],
                       const uint64_t (&strides)[3], const uint32_t (&box)[2]);

// Only tools, tests and examples use the functions below. Those that release something report no
// errors.
Pointer allocate(size_t bytes);
void release(Pointer);
void copy_to_device(Pointer, const void*, size_t bytes);
void copy_to_host(void*, Pointer, size_t bytes);
void fill(Pointer, uint8_t value, size_t bytes);
/// Fills with copies of a float, in the order of the stream.
void fill(Pointer, float value, size_t count, Stream);
void synchronize();
Event create_event();
void destroy_event(Event);
void record(Event, Stream);
float elapsed_ms(Event start, Event stop); ///< milliseconds; waits for `stop`
Stream create_stream();
void destroy_stream(Stream);
void synchronize(Stream);

/// Device memory.
class Memory {
public:
  explicit Memory(size_t bytes) : bytes_(bytes), pointer_(allocate(bytes)) {}
  ~Memory() { release(pointer_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Pointer pointer() const { return pointer_; }
  size_t bytes() const { return bytes_; }

private:
  size_t bytes_;
  Pointer pointer_;
};

/// Measures time on the GPU, between two events on the null stream.
class Stopwatch {
public:
  Stopwatch() = default;
  ~Stopwatch() {
    destroy_event(start_);
    destroy_event(stop_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start() { record(start_, nullptr); }
  void stop() { record(stop_, nullptr); }
  double milliseconds() const { return elapsed_ms(start_, stop_); } ///< waits for the second event

private:
  Event start_ = create_event(), stop_ = create_event();
};

} // namespace sagebwd::driver
