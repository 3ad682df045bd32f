//===- attention.cpp - The operation ----------------------------------------===//

#include "runtime/attention.h"

#include "runtime/driver/driver.h"
#include "runtime/kernels.h"

#include <bit>
#include <cmath>
#include <mutex>

namespace sagebwd {
namespace {

/// A kernel in a device's primary context.
struct LoadedKernel {
  KernelSpec spec;
  driver::Function function = nullptr;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
};

/// Modules stay loaded for the life of the process: unloading would have to wait for the device.
LoadedKernel load(const BuiltKernel& built) {
  LoadedKernel kernel;
  kernel.spec = built.spec;
  const driver::Module module = driver::load_module(built.entry.cubin);
  kernel.function = driver::get_function(module, built.entry.kernel_name);
  kernel.threads = static_cast<unsigned>(built.threads);
  kernel.shared_bytes = static_cast<unsigned>(built.shared_bytes);
  if (built.shared_bytes > 0)
    driver::set_max_dynamic_shared(kernel.function, built.shared_bytes);
  return kernel;
}

void set(OperandValues& values, Operand operand, uint64_t value) {
  values[static_cast<size_t>(operand)] = value;
}
void set(OperandValues& values, Operand operand, const void* pointer) {
  set(values, operand, reinterpret_cast<uint64_t>(pointer));
}

/// The copies move 16 bytes at a time.
constexpr int64_t kAlignBytes = 16, kElementBytes = 2;

/// Puts a tensor and its strides in; `first` is its pointer's operand, `stride_b` its first
/// stride's. Strides of dimensions of size 1 do not matter and are not looked at.
void set_tensor(OperandValues& values, const char* name, const Tensor& tensor, int64_t batch,
                int64_t heads, int64_t tokens, Operand pointer, Operand stride_b) {
  const auto refuse = [&](const std::string& what) {
    throw SpecError(std::string(name) + ": " + what +
                    "; channels must be contiguous and every token 16-byte aligned: make a "
                    "contiguous copy");
  };
  if (tensor.data == nullptr)
    throw SpecError(std::string(name) + ": the address is null; hand in device memory");
  if (reinterpret_cast<uint64_t>(tensor.data) % kAlignBytes != 0)
    refuse("the address is not a multiple of 16 bytes");
  const std::pair<int64_t, int64_t> dimensions[] = {
      {batch, tensor.stride_b}, {heads, tensor.stride_h}, {tokens, tensor.stride_s}};
  set(values, pointer, tensor.data);
  for (int i = 0; i < 3; ++i) {
    const auto [size, stride] = dimensions[i];
    if (size > 1 && stride * kElementBytes % kAlignBytes != 0)
      refuse("the " +
             std::string(i == 0   ? "batch"
                         : i == 1 ? "head"
                                  : "token") +
             " stride is " + std::to_string(stride) + " elements, not a multiple of 8");
    set(values, static_cast<Operand>(static_cast<int>(stride_b) + i),
        static_cast<uint64_t>(size > 1 ? stride : 0));
  }
}

void check_scale(float scale) {
  if (!(scale > 0) || !std::isfinite(scale))
    throw SpecError("softmax_scale = " + std::to_string(scale) +
                    " is not supported: it must be positive and finite (the default is "
                    "1 / sqrt(head_dim))");
}

void check_workspace(const void* workspace, size_t given, size_t needed) {
  if (given < needed)
    throw SpecError("the workspace has " + std::to_string(given) + " bytes and " +
                    std::to_string(needed) +
                    " are needed: ask forward_workspace_bytes() or "
                    "backward_workspace_bytes()");
  if (workspace == nullptr || reinterpret_cast<uint64_t>(workspace) % 256 != 0)
    throw SpecError("the workspace must be device memory aligned to 256 bytes");
}

} // namespace

struct Attention::State {
  AttentionSpec spec;
  Arch arch;
  Tiles tiles;
  int device = 0;
  std::mutex mutex;
  std::vector<LoadedKernel> kernels[2]; ///< of each pass; empty until loaded

  const std::vector<LoadedKernel>& loaded(Pass pass, driver::Stream stream);
  void run(Pass pass, const Problem&, OperandValues&, void* workspace, size_t workspace_size,
           float softmax_scale, void* stream);
};

/// The kernels of a pass, built and loaded on first use. The device's context is current.
const std::vector<LoadedKernel>& Attention::State::loaded(Pass pass, driver::Stream stream) {
  std::lock_guard lock(mutex);
  std::vector<LoadedKernel>& result = kernels[static_cast<int>(pass)];
  if (result.empty()) {
    if (driver::is_capturing(stream))
      throw DriverError("the stream is being captured into a CUDA graph and the " +
                            std::string(to_string(pass)) + " kernels of " + to_string(spec) +
                            " are not loaded yet: call warmup() before the capture",
                        900); // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    std::vector<LoadedKernel> fresh;
    for (const auto& built : build_all(kernels_of(pass, spec, arch, tiles)))
      fresh.push_back(load(*built));
    result = std::move(fresh);
  }
  return result;
}

void Attention::State::run(Pass pass, const Problem& problem, OperandValues& values,
                           void* workspace, size_t workspace_size, float softmax_scale,
                           void* stream) {
  check_scale(softmax_scale);
  check_workspace(workspace, workspace_size, sagebwd::workspace_bytes(pass, spec, problem));
  place_workspace(pass, spec, problem, reinterpret_cast<uint64_t>(workspace), values);
  set(values, Operand::softmax_scale, uint64_t{std::bit_cast<uint32_t>(softmax_scale)});

  const driver::DeviceScope scope(device);
  const auto cuda_stream = static_cast<driver::Stream>(stream);
  for (const LoadedKernel& kernel : loaded(pass, cuda_stream)) {
    alignas(16) std::byte params[512];
    pack_params(fields_of(kernel.spec.kind), values, params);
    const Grid grid = grid_of(kernel.spec, problem);
    driver::launch(kernel.function, grid.x, grid.y, grid.z, kernel.threads, kernel.shared_bytes,
                   cuda_stream, params);
  }
}

Attention::Attention(const AttentionSpec& spec, int device, const std::optional<Tiles>& tiles)
    : state_(std::make_unique<State>()) {
  state_->device = device;
  const driver::DeviceInfo info = driver::device_info(device);
  state_->arch = arch_for_capability(info.major, info.minor);
  state_->spec = resolved(spec, state_->arch);
  state_->tiles = tiles ? *tiles : default_tiles(state_->spec, state_->arch);
}

Attention::~Attention() = default;

const AttentionSpec& Attention::spec() const { return state_->spec; }
const Arch& Attention::arch() const { return state_->arch; }

void Attention::warmup(bool backward) {
  const driver::DeviceScope scope(state_->device);
  state_->loaded(Pass::forward, nullptr);
  if (backward)
    state_->loaded(Pass::backward, nullptr);
}

size_t Attention::forward_workspace_bytes(const Problem& problem) const {
  return workspace_bytes(Pass::forward, state_->spec, problem);
}
size_t Attention::backward_workspace_bytes(const Problem& problem) const {
  return workspace_bytes(Pass::backward, state_->spec, problem);
}

void Attention::forward(const ForwardArgs& a) {
  const Problem& p = a.problem;
  check(state_->spec, p);
  OperandValues values{};
  set_tensor(values, "q", a.q, p.batch, p.heads, p.seq_q, Operand::q, Operand::q_stride_b);
  set_tensor(values, "k", a.k, p.batch, p.heads_kv, p.seq_kv, Operand::k, Operand::k_stride_b);
  set_tensor(values, "v", a.v, p.batch, p.heads_kv, p.seq_kv, Operand::v, Operand::v_stride_b);
  set_tensor(values, "out", a.out, p.batch, p.heads, p.seq_q, Operand::out, Operand::out_stride_b);
  if (a.lse == nullptr)
    throw SpecError("lse: the address is null; hand in (batch, heads, query) floats");
  set(values, Operand::lse, a.lse);
  state_->run(Pass::forward, p, values, a.workspace, a.workspace_bytes, a.softmax_scale, a.stream);
}

void Attention::backward(const BackwardArgs& a) {
  const Problem& p = a.problem;
  check(state_->spec, p);
  OperandValues values{};
  set_tensor(values, "q", a.q, p.batch, p.heads, p.seq_q, Operand::q, Operand::q_stride_b);
  set_tensor(values, "k", a.k, p.batch, p.heads_kv, p.seq_kv, Operand::k, Operand::k_stride_b);
  set_tensor(values, "v", a.v, p.batch, p.heads_kv, p.seq_kv, Operand::v, Operand::v_stride_b);
  set_tensor(values, "out", a.out, p.batch, p.heads, p.seq_q, Operand::out, Operand::out_stride_b);
  set_tensor(values, "dout", a.dout, p.batch, p.heads, p.seq_q, Operand::dout,
             Operand::dout_stride_b);
  set_tensor(values, "dq", a.dq, p.batch, p.heads, p.seq_q, Operand::dq, Operand::dq_stride_b);
  set_tensor(values, "dk", a.dk, p.batch, p.heads_kv, p.seq_kv, Operand::dk, Operand::dk_stride_b);
  set_tensor(values, "dv", a.dv, p.batch, p.heads_kv, p.seq_kv, Operand::dv, Operand::dv_stride_b);
  if (a.lse == nullptr)
    throw SpecError("lse: the address is null; hand in what the forward pass gave");
  set(values, Operand::lse, a.lse);
  set(values, Operand::dlse, a.dlse);
  state_->run(Pass::backward, p, values, a.workspace, a.workspace_bytes, a.softmax_scale, a.stream);
}

} // namespace sagebwd
