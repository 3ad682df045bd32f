//===- on_gpu.h - The kernels, on host data -------------------------------===//
//
// What the command line and the GPU tests run kernels with. Device memory starts as 0xff bytes,
// which is NaN in bf16, fp16 and FP32 and never what a kernel stores (its NaNs are 0x7fff and
// 0x7fffffff), and lies between guards: what is not written, or written beside, shows.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"
#include "runtime/driver/driver.h"
#include "runtime/reference/reference.h"

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sagebwd {

/// Raises LibraryError with a remedy where there is no such GPU.
void require_gpu(int device, const char* command);

inline constexpr uint8_t kPoison = 0xff;

/// What was not written, or written where nothing belongs; a sentence each.
using Faults = std::vector<std::string>;

/// Device memory between two guards.
class Buffer {
public:
  /// Without `start` it is neither filled nor guarded: what compute-sanitizer wants to see.
  explicit Buffer(size_t bytes, std::optional<uint8_t> start = kPoison);
  ~Buffer() { driver::release(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  driver::Pointer pointer() const { return memory_ + guard_; }
  template <typename T = void> T* as() const { return reinterpret_cast<T*>(pointer()); }
  size_t bytes() const { return bytes_; }

  /// Copies as many bytes as there are.
  template <typename T> void upload(const std::vector<T>& values) {
    if (values.size() * sizeof(T) != bytes_)
      throw std::logic_error("device memory is given another number of bytes than it has");
    driver::copy_to_device(pointer(), values.data(), bytes_);
  }
  template <typename T> std::vector<T> download() const {
    std::vector<T> values(bytes_ / sizeof(T));
    driver::copy_to_host(values.data(), pointer(), bytes_);
    return values;
  }
  void check_guards(const char* name, Faults&) const;

private:
  size_t bytes_, guard_;
  driver::Pointer memory_;
};

/// Where the elements of a (batch, head, token, channel) tensor lie. `padding` elements (a multiple
/// of 8) follow each token.
struct Layout {
  bool bshd = false;
  int64_t padding = 0;
};

/// A tensor of 16-bit elements in device memory.
class DeviceTensor {
public:
  DeviceTensor(DType, int64_t batch, int64_t heads, int64_t tokens, int64_t channels, Layout,
               std::optional<uint8_t> start);

  const Tensor& view() const { return view_; }
  /// From contiguous values; padding stays NaN.
  void upload(const std::vector<float>& values);
  /// To contiguous values. A fault where an element is not written, or anything else is.
  std::vector<float> download(const char* name, Faults&) const;

private:
  /// Calls with the place in memory and the index in contiguous order.
  template <typename Visit> void for_each(Visit) const;

  DType dtype_;
  int64_t sizes_[4];
  Buffer buffer_;
  Tensor view_;
};

struct RunOptions {
  Layout layout;
  driver::Stream stream = nullptr;
  std::optional<uint8_t> workspace_start = kPoison;
  std::optional<uint8_t> start = kPoison; ///< of all other memory
  /// Queries and keys of packed sequences, which the inputs' batch of 1 holds one behind the other.
  std::vector<std::pair<int, int>> lengths = {};
  std::vector<std::pair<int, int>> used = {}; ///< of these, those that count; none: all
  bool apart = false;                         ///< they are a batch's, each of as many
  int value_dim = 0;                          ///< channels of v, out, dout and dv; 0: as many
};

/// All memory of one forward and backward call on the current device; inputs are uploaded.
struct Operands {
  Operands(const Attention&, const reference::Inputs&, const RunOptions& = {});

  DeviceTensor queries(int channels) const;
  DeviceTensor keys(int channels) const;
  size_t rows_bytes() const {
    return sizeof(float) * problem.batch * problem.heads * problem.seq_q;
  }
  /// All outputs, with what is wrong with their memory and the workspaces'.
  reference::Outputs<float> download(Faults&) const;

  Problem problem;
  DType dtype;
  int channels;
  RunOptions options;
  int value_channels = options.value_dim ? options.value_dim : channels;
  DeviceTensor q = queries(channels), k = keys(channels);
  DeviceTensor v = keys(value_channels), dout = queries(value_channels);
  DeviceTensor out = queries(value_channels), dq = queries(channels);
  DeviceTensor dk = keys(channels), dv = keys(value_channels);
  Buffer lse{rows_bytes(), options.start}, dlse{rows_bytes(), options.start};
  Problem call; ///< the problem as a call has it
  Buffer forward_workspace;
  std::optional<Buffer> backward_workspace; ///< no larger than these tensors need it
  std::optional<Buffer> k_mean;             ///< where the inputs have one
  Buffer first_queries{packing_bytes(1)}, first_keys{packing_bytes(1)};
  Buffer lengths_q{packing_bytes(0)}, lengths_kv{packing_bytes(0)};
  ForwardArgs forward;
  BackwardArgs backward;

private:
  size_t packing_bytes(size_t more) const {
    return sizeof(int32_t) * (options.lengths.size() + more);
  }
};

/// Copies the inputs to a device, runs forward and backward, copies o, lse, dq, dk and dv back.
/// Without a place for the faults LibraryError is raised where there are any.
reference::Outputs<float> run_on_gpu(Attention&, int device, const reference::Inputs&,
                                     const RunOptions& = {}, Faults* = nullptr);

/// What a run of these inputs should give: the emulated forward, and the emulated backward of the
/// run's own out and lse.
reference::Outputs<float> emulate_like(const AttentionSpec&, const reference::Inputs&,
                                       const reference::Outputs<float>& run);

} // namespace sagebwd
