//===- driver.h - The CUDA driver, opened when it is first needed ----------===//
//
// The only file that declares the driver's types. Nothing here synchronises.
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

/// Why there is no usable driver or GPU, or empty where there is one. Never throws.
const std::string& unavailable();

int device_count();
int driver_version(); ///< e.g. 13000
/// "12.8" of 12080.
std::string version_text(int cuda_version);
/// The same, or 0 where this process has not opened a usable driver so far. Opens none.
int opened_driver_version();
struct DeviceInfo {
  std::string name;
  std::string uuid; ///< "GPU-8dd7...", in any process; empty before CUDA 11.4
  int major = 0, minor = 0;
  int sm_count = 0;
  int max_shared_bytes = 0; ///< per block, opted in
  size_t memory_bytes = 0;
};
DeviceInfo device_info(int ordinal);

/// Makes a device's primary context current on this thread for a scope.
class DeviceScope {
public:
  explicit DeviceScope(int ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
};

Module load_module(const std::string& cubin); ///< into the current context
size_t loaded_modules();                      ///< by this process so far; none is unloaded
Function get_function(Module, const std::string& name);
void set_max_dynamic_shared(Function, int bytes);
/// One launch on the caller's stream; `params` is the kernel's single by-value struct. One that
/// `overlaps` may begin before the kernel in front of it has ended (compute capability 9.0 and
/// later): its code waits for what it needs (templates/ptx/stream_order.cuh).
void launch(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
            unsigned shared_bytes, Stream, void* params, bool overlaps = false);
bool is_capturing(Stream);
/// Encodes a tensor of 16-bit elements for copies of boxes of the first two dimensions that become
/// rows of 128 bytes, with the swizzle that wgmma reads; what lies outside is zeros. `map` has 128
/// bytes at a multiple of 64; sizes innermost first; strides in bytes, of all but the innermost.
void encode_tensor_map(void* map, uint64_t address, const uint64_t (&sizes)[4],
                       const uint64_t (&strides)[3], const uint32_t (&box)[2]);

// For tools, tests and examples; the operation itself needs none of these.
Pointer allocate(size_t bytes);
void release(Pointer);
void copy_to_device(Pointer, const void*, size_t bytes);
void copy_to_host(void*, Pointer, size_t bytes);
void fill(Pointer, uint8_t value, size_t bytes);
void synchronize();
Event create_event();
void destroy_event(Event);
void record(Event, Stream);
float elapsed_ms(Event start, Event stop); ///< waits for `stop`
Stream create_stream();
void destroy_stream(Stream);
void synchronize(Stream);

} // namespace sagebwd::driver
