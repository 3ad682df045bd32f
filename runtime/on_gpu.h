//===- on_gpu.h - Run the kernels on host data ----------------------------===//
//
// The command line and the GPU tests run kernels with these functions. Device memory starts as 0xff
// bytes, which is NaN in bf16, fp16 and FP32 and never a value that a kernel stores (its NaNs are
// 0x7fff and 0x7fffffff). The memory lies between guards. So elements that are not written, and
// writes outside a tensor, are detected.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"
#include "runtime/driver/driver.h"
#include "runtime/reference/reference.h"

#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sagebwd {

/// Raises LibraryError with a remedy if there is no such GPU.
void require_gpu(int device, const char* command);

inline constexpr uint8_t kPoison = 0xff;

/// One sentence for each output that was not written, or that was written outside its tensor.
using Faults = std::vector<std::string>;

/// Device memory between two guards.
class Buffer {
public:
  /// Without `start` the memory is neither filled nor guarded: compute-sanitizer then sees
  /// uninitialised reads.
  explicit Buffer(size_t bytes, std::optional<uint8_t> start = kPoison);

  driver::Pointer pointer() const { return memory_.pointer() + guard_; }
  template <typename T = void> T* as() const { return reinterpret_cast<T*>(pointer()); }
  size_t bytes() const { return bytes_; }

  /// Copies the values, whose bytes must be as many as the buffer's.
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
  driver::Memory memory_;
};

/// The place of the elements of a (batch, head, token, channel) tensor. `padding` elements (a
/// multiple of 8) follow each token.
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
  /// Copies contiguous values; the padding stays NaN.
  void upload(const std::vector<float>& values);
  /// Returns contiguous values. Adds a fault if an element is not written or the padding is
  /// written.
  std::vector<float> download(const char* name, Faults&) const;

private:
  /// Calls `visit` with the place in memory and the index in contiguous order.
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
  /// The numbers of queries and keys of each packed sequence; the inputs' batch of 1 holds the
  /// sequences one behind the other.
  std::vector<std::pair<int, int>> lengths = {};
  /// The tokens that count in each of `lengths`; empty: all.
  std::vector<std::pair<int, int>> used = {};
  bool apart = false; ///< the sequences are those of a batch, of one length each
  int value_dim = 0;  ///< channels of v, out, dout and dv; 0: as many as q has
  /// Lists as bits, in place of those of the inputs, which are then for nobody; one set of lists
  /// for all heads and sequences where they are as many as one head has.
  std::vector<uint32_t> row_bits = {};
};

/// The inputs' lists of blocks, as the kernels read them.
std::vector<uint32_t> packed_lists(const AttentionSpec&, const reference::Inputs&);

/// The memory of one forward and one backward call on the current device. The constructor uploads
/// the inputs.
struct Operands {
  Operands(const Attention&, const reference::Inputs&, const RunOptions& = {});

  DeviceTensor queries(int channels) const;
  DeviceTensor keys(int channels) const;
  size_t rows_bytes() const {
    return sizeof(float) * problem.batch * problem.heads * problem.seq_q;
  }
  /// Downloads all outputs. Adds the faults in their memory and in the workspaces.
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
  Problem call; ///< the problem as a call expects it
  Buffer forward_workspace;
  /// No larger than these tensors need it.
  std::optional<Buffer> backward_workspace;
  std::optional<Buffer> k_mean;          ///< if the inputs have one
  std::optional<Buffer> row_bits;        ///< if the spec has lists
  std::optional<Buffer> intervals;       ///< if the inputs have some
  std::deque<Buffer> tables;             ///< the inputs'
  std::optional<Buffer> shares, dshares; ///< if the inputs have shares
  std::optional<DeviceTensor> sparse_out;
  std::optional<Buffer> max_logits; ///< if the spec has them
  Buffer first_queries{packing_bytes(1)}, first_keys{packing_bytes(1)};
  Buffer lengths_q{packing_bytes(0)}, lengths_kv{packing_bytes(0)};
  ForwardArgs forward;
  BackwardArgs backward;

private:
  void add_lists(const AttentionSpec&, const reference::Inputs&);
  /// And the lists that follow from them.
  void add_intervals(const Attention&, const reference::Inputs&);
  void add_tables(const reference::Inputs&);
  void add_lists_of_mask(const Attention&);
  void add_shares(const reference::Inputs&);
  size_t packing_bytes(size_t more) const {
    return sizeof(int32_t) * (options.lengths.size() + more);
  }
};

/// Copies the inputs to a device, runs forward and backward, and copies o, lse, dq, dk and dv back.
/// If `faults` is null, faults raise LibraryError.
reference::Outputs<float> run_on_gpu(Attention&, int device, const reference::Inputs&,
                                     const RunOptions& = {}, Faults* = nullptr);

/// The expected outputs of a run: the emulated forward, and the emulated backward of the run's own
/// out and lse (with linear attention that of the emulated ones).
reference::Outputs<float> emulate_like(const AttentionSpec&, const reference::Inputs&,
                                       const reference::Outputs<float>& run);

} // namespace sagebwd
