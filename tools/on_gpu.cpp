//===- on_gpu.cpp - The kernels, on host data ------------------------------===//
#include "tools/on_gpu.h"

#include "runtime/driver/driver.h"

#include <cmath>

namespace sagebwd::tools {

namespace {

constexpr uint8_t kNaNByte = 0xff; ///< 0xffff is NaN in bf16 and fp16, 0xffffffff in FP32

/// Device memory that starts as NaN.
class Buffer {
public:
  explicit Buffer(size_t bytes) : bytes_(bytes), pointer_(bytes ? driver::allocate(bytes) : 0) {
    if (bytes)
      driver::fill(pointer_, kNaNByte, bytes);
  }
  ~Buffer() {
    if (pointer_)
      driver::release(pointer_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <typename T = void> T* as() const { return reinterpret_cast<T*>(pointer_); }
  driver::Pointer pointer() const { return pointer_; }
  size_t bytes() const { return bytes_; }

private:
  size_t bytes_;
  driver::Pointer pointer_;
};

/// A (batch, head, token, channel) tensor of 16-bit elements and its strides.
class DeviceTensor {
public:
  DeviceTensor(DType dtype, int64_t batch, int64_t heads, int64_t tokens, int head_dim,
               Layout layout, int64_t padding)
      : dtype_(dtype), batch_(batch), heads_(heads), tokens_(tokens), head_dim_(head_dim),
        buffer_(sizeof(uint16_t) * batch * heads * tokens * (head_dim + padding)) {
    int64_t row = head_dim + padding;
    view_.data = buffer_.as();
    view_.stride_b = heads * tokens * row;
    view_.stride_h = layout == Layout::bhsd ? tokens * row : row;
    view_.stride_s = layout == Layout::bhsd ? row : heads * row;
  }

  const Tensor& view() const { return view_; }

  /// From contiguous (batch, head, token, channel). Padding holds NaN.
  void upload(const std::vector<float>& values) {
    std::vector<uint16_t> bits(buffer_.bytes() / sizeof(uint16_t), 0xffff);
    for_each_element(
        [&](size_t at, size_t index) { bits[at] = reference::encode(dtype_, values[index]); });
    driver::copy_to_device(buffer_.pointer(), bits.data(), buffer_.bytes());
  }

  std::vector<float> download() const {
    std::vector<uint16_t> bits(buffer_.bytes() / sizeof(uint16_t));
    driver::copy_to_host(bits.data(), buffer_.pointer(), buffer_.bytes());
    std::vector<float> values(static_cast<size_t>(batch_ * heads_ * tokens_ * head_dim_));
    for_each_element(
        [&](size_t at, size_t index) { values[index] = reference::decode(dtype_, bits[at]); });
    return values;
  }

private:
  /// Calls with the offset in memory and the index in the contiguous order.
  template <typename Visit> void for_each_element(Visit visit) const {
    size_t index = 0;
    for (int64_t b = 0; b < batch_; ++b)
      for (int64_t h = 0; h < heads_; ++h)
        for (int64_t s = 0; s < tokens_; ++s)
          for (int64_t d = 0; d < head_dim_; ++d)
            visit(b * view_.stride_b + h * view_.stride_h + s * view_.stride_s + d, index++);
  }

  DType dtype_;
  int64_t batch_, heads_, tokens_;
  int head_dim_;
  Buffer buffer_;
  Tensor view_;
};

} // namespace

void require_gpu(int device, const char* command) {
  const std::string what = std::string(command) + " runs kernels on a GPU. ";
  if (const std::string& why = driver::unavailable(); !why.empty())
    throw LibraryError(what + "Not here: " + why +
                       "\nWithout one, 'sagebwd trace --device cpu' "
                       "checks the numerics and 'sagebwd build' compiles.");
  if (device >= driver::device_count())
    throw LibraryError(what + "--gpu is " + std::to_string(device) + ", this machine has " +
                       std::to_string(driver::device_count()) + ", numbered from 0.");
}

reference::Outputs<float> run_on_gpu(Attention& attention, int device,
                                     const reference::Inputs& inputs, Layout layout,
                                     int64_t padding) {
  const Problem& problem = inputs.problem;
  const bool backward = !inputs.dout.empty();
  const float scale = inputs.softmax_scale != 0
                          ? inputs.softmax_scale
                          : 1 / std::sqrt(static_cast<float>(inputs.head_dim));
  driver::DeviceScope scope(device);

  auto queries = [&] {
    return DeviceTensor(attention.spec().dtype, problem.batch, problem.heads, problem.seq_q,
                        inputs.head_dim, layout, padding);
  };
  auto keys = [&] {
    return DeviceTensor(attention.spec().dtype, problem.batch, problem.heads_kv, problem.seq_kv,
                        inputs.head_dim, layout, padding);
  };
  DeviceTensor q = queries(), out = queries(), k = keys(), v = keys();
  q.upload(inputs.q);
  k.upload(inputs.k);
  v.upload(inputs.v);
  const size_t lse_count = problem.batch * problem.heads * problem.seq_q;
  Buffer lse(sizeof(float) * lse_count);
  Buffer forward_workspace(attention.forward_workspace_bytes(problem));

  ForwardArgs forward;
  forward.problem = problem;
  forward.q = q.view(), forward.k = k.view(), forward.v = v.view();
  forward.out = out.view();
  forward.lse = lse.as<float>();
  forward.softmax_scale = scale;
  forward.workspace = forward_workspace.as();
  forward.workspace_bytes = forward_workspace.bytes();
  attention.forward(forward);

  reference::Outputs<float> result;
  driver::synchronize();
  result.o = out.download();
  result.lse.resize(lse_count);
  driver::copy_to_host(result.lse.data(), lse.pointer(), lse.bytes());
  if (!backward)
    return result;

  DeviceTensor dout = queries(), dq = queries(), dk = keys(), dv = keys();
  dout.upload(inputs.dout);
  Buffer dlse(sizeof(float) * inputs.dlse.size());
  if (!inputs.dlse.empty())
    driver::copy_to_device(dlse.pointer(), inputs.dlse.data(), dlse.bytes());
  Buffer backward_workspace(attention.backward_workspace_bytes(problem));

  BackwardArgs args;
  args.problem = problem;
  args.q = q.view(), args.k = k.view(), args.v = v.view();
  args.out = out.view(), args.dout = dout.view();
  args.lse = lse.as<float>();
  args.dlse = inputs.dlse.empty() ? nullptr : dlse.as<float>();
  args.dq = dq.view(), args.dk = dk.view(), args.dv = dv.view();
  args.softmax_scale = scale;
  args.workspace = backward_workspace.as();
  args.workspace_bytes = backward_workspace.bytes();
  attention.backward(args);

  driver::synchronize();
  result.dq = dq.download();
  result.dk = dk.download();
  result.dv = dv.download();
  return result;
}

} // namespace sagebwd::tools
