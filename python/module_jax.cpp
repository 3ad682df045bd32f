//===- module_jax.cpp - Both passes as calls of XLA -------------------------===//
//
// jax.ffi registers these: XLA hands over its buffers, which are contiguous, its stream and memory
// for the workspace. Shapes were checked when the call was traced (integrations/jax.py).
//
//===----------------------------------------------------------------------===//
#include "python/module_jax.h"

#include "runtime/attention.h"

#include <xla/ffi/api/ffi.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace ffi = xla::ffi;
using namespace sagebwd;

namespace {

using Buffer = ffi::AnyBuffer;
using Rows = ffi::Buffer<ffi::F32>;
using Words = ffi::Buffer<ffi::U32>;
template <typename T> using Out = ffi::Result<T>;

/// The kernels want their workspace at a multiple of this, and XLA gives memory at no larger one
/// than the second: it refuses to be asked for more.
constexpr size_t kWorkspaceAlignment = 256, kXlaAlignment = 16;

/// Memory on the device until the pass has run: bytes, and what its address is a multiple of.
using Allocate = std::function<void*(size_t, size_t)>;

/// XLA's scratch memory, with what XLA says where it gives none.
class Scratch {
public:
  Scratch(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context)
      : said_(std::make_unique<ffi::DiagnosticEngine>()),
        memory_(*ffi::CtxDecoding<ffi::ScratchAllocator>::Decode(api, context, *said_)) {}

  void* allocate(size_t bytes, size_t alignment) {
    if (const std::optional<void*> memory = memory_.Allocate(bytes, alignment))
      return *memory;
    throw std::runtime_error("XLA gives no memory for the workspace, of which " +
                             std::to_string(bytes) +
                             " bytes were asked for. It says: " + said_->Result());
  }

private:
  std::unique_ptr<ffi::DiagnosticEngine> said_;
  ffi::ScratchAllocator memory_;
};

} // namespace

template <> struct xla::ffi::CtxDecoding<Scratch> {
  using Type = Scratch;
  static std::optional<Scratch> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                       DiagnosticEngine&) {
    return std::optional<Scratch>(std::in_place, api, context);
  }
};

namespace {

struct Where {
  int device;
  void* stream;
  Allocate allocate;
};
struct Call {
  std::string_view spec, layout;
  float softmax_scale;
};

/// Made once for each line of options and device. Beyond as many, of a program whose windows keep
/// changing, all are forgotten: their kernels are shared.
constexpr size_t kMostOperations = 256;
std::shared_ptr<Attention> operation(const std::string& spec, int device) {
  static std::mutex mutex;
  static auto& made = *new std::map<std::pair<std::string, int>, std::shared_ptr<Attention>>;
  const std::lock_guard lock(mutex);
  if (made.size() >= kMostOperations && !made.contains({spec, device}))
    made.clear();
  auto& found = made[{spec, device}];
  if (!found)
    found = std::make_shared<Attention>(parse_spec(spec), device);
  return found;
}

struct Shape {
  int64_t batch, heads, tokens, channels;
  bool heads_first;
  Shape(const Buffer& buffer, std::string_view layout) : heads_first(layout == "bhsd") {
    const auto dims = buffer.dimensions();
    batch = dims[0], heads = dims[heads_first ? 1 : 2], tokens = dims[heads_first ? 2 : 1];
    channels = dims[3];
  }
};

Tensor tensor(const Buffer& buffer, std::string_view layout) {
  const Shape s(buffer, layout);
  const int64_t head = s.heads_first ? s.tokens * s.channels : s.channels;
  const int64_t token = s.heads_first ? s.channels : s.heads * s.channels;
  return {buffer.untyped_data(), s.heads * s.tokens * s.channels, head, token};
}

template <typename Args>
void begin(Args& args, const Buffer& q, const Buffer& k, const Buffer& v, const Call& call) {
  const Shape of_q(q, call.layout), of_k(k, call.layout);
  args.problem = {of_q.batch, of_q.heads, of_k.heads, of_q.tokens, of_k.tokens};
  args.q = tensor(q, call.layout);
  args.k = tensor(k, call.layout);
  args.v = tensor(v, call.layout);
  args.softmax_scale = call.softmax_scale;
  args.value_dim = static_cast<int>(v.dimensions()[3]);
}

template <typename Args> void give_workspace(Args& args, size_t bytes, const Where& where) {
  size_t there = bytes + kWorkspaceAlignment - 1;
  args.workspace = where.allocate(there, kXlaAlignment);
  std::align(kWorkspaceAlignment, bytes, args.workspace, there);
  args.workspace_bytes = bytes;
  args.stream = where.stream;
}

/// Turns what is thrown into XLA's error: nothing may be thrown through XLA.
template <typename Run> ffi::Error guarded(const Run& run) {
  try {
    run();
    return ffi::Error::Success();
  } catch (const SpecError& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error forward(const Where& where, const Call& call, const Buffer& q, const Buffer& k,
                   const Buffer& v, Out<Buffer> out, Out<Rows> lse) {
  return guarded([&] {
    const auto attention = operation(std::string(call.spec), where.device);
    ForwardArgs args;
    begin(args, q, k, v, call);
    args.out = tensor(*out, call.layout);
    args.lse = lse->typed_data();
    give_workspace(args, attention->forward_workspace_bytes(args.problem), where);
    attention->forward(args);
  });
}

ffi::Error backward(const Where& where, const Call& call, const Buffer& dout, const Buffer& q,
                    const Buffer& k, const Buffer& v, const Buffer& out, const Rows& lse,
                    const Rows& dlse, Out<Buffer> dq, Out<Buffer> dk, Out<Buffer> dv) {
  return guarded([&] {
    const auto attention = operation(std::string(call.spec), where.device);
    BackwardArgs args;
    begin(args, q, k, v, call);
    args.dout = tensor(dout, call.layout);
    args.out = tensor(out, call.layout);
    args.lse = lse.typed_data();
    args.dlse = dlse.element_count() == 0 ? nullptr : dlse.typed_data();
    args.dq = tensor(*dq, call.layout);
    args.dk = tensor(*dk, call.layout);
    args.dv = tensor(*dv, call.layout);
    give_workspace(args, attention->prepare(args).workspace_bytes(), where);
    attention->backward(args);
  });
}

//===--- SLA2's attention: exact to listed blocks, mixed with linear ------===//

/// Of (batch or 1, heads or 1, lists, words).
Lists lists_of(const Words& bits) {
  const auto dims = bits.dimensions();
  const int64_t head = dims[2] * dims[3];
  return {bits.typed_data(), dims[0] > 1 ? dims[1] * head : 0, dims[1] > 1 ? head : 0};
}

/// Of (batch or 1, heads or 1, shares), where shares are as many as queries or as lists, or 1.
Shares shares_of(const Rows& alpha, const Attention& attention, const Problem& problem) {
  const auto dims = alpha.dimensions();
  return {.alpha = alpha.typed_data(),
          .stride_b = dims[0] > 1 ? dims[1] * dims[2] : 0,
          .stride_h = dims[1] > 1 ? dims[2] : 0,
          .stride_s = dims[2] > 1,
          .tokens = dims[2] == problem.seq_q ? 1 : attention.spec()->sparse_q};
}

ffi::Error sparse_linear_forward(const Where& where, const Call& call, const Buffer& q,
                                 const Buffer& k, const Buffer& v, const Words& bits,
                                 const Rows& alpha, Out<Buffer> out, Out<Buffer> sparse_out,
                                 Out<Rows> lse) {
  return guarded([&] {
    const auto attention = operation(std::string(call.spec), where.device);
    ForwardArgs args;
    begin(args, q, k, v, call);
    args.out = tensor(*out, call.layout);
    args.lse = lse->typed_data();
    args.lists = lists_of(bits);
    args.shares = shares_of(alpha, *attention, args.problem);
    args.sparse_out = tensor(*sparse_out, call.layout);
    give_workspace(args, attention->forward_workspace_bytes(args.problem), where);
    attention->forward(args);
  });
}

ffi::Error sparse_linear_backward(const Where& where, const Call& call, const Buffer& dout,
                                  const Buffer& q, const Buffer& k, const Buffer& v,
                                  const Buffer& sparse_out, const Rows& lse, const Words& bits,
                                  const Rows& alpha, Out<Buffer> dq, Out<Buffer> dk, Out<Buffer> dv,
                                  Out<Rows> dalpha) {
  return guarded([&] {
    const auto attention = operation(std::string(call.spec), where.device);
    BackwardArgs args;
    begin(args, q, k, v, call);
    args.dout = tensor(dout, call.layout);
    args.out = tensor(sparse_out, call.layout);
    args.lse = lse.typed_data();
    args.dq = tensor(*dq, call.layout);
    args.dk = tensor(*dk, call.layout);
    args.dv = tensor(*dv, call.layout);
    args.lists = lists_of(bits);
    args.shares = shares_of(alpha, *attention, args.problem);
    args.dalpha = dalpha->typed_data();
    give_workspace(args, attention->prepare(args).workspace_bytes(), where);
    attention->backward(args);
  });
}

//===--- What XLA calls ---------------------------------------------------===//

template <typename Binding> auto bind_call(Binding&& binding) {
  return std::move(binding)
      .template Attr<std::string_view>("spec")
      .template Attr<std::string_view>("layout")
      .template Attr<float>("softmax_scale");
}
template <typename Binding> auto bind_forward(Binding&& binding) {
  return bind_call(std::move(binding))
      .template Arg<Buffer>() // q
      .template Arg<Buffer>() // k
      .template Arg<Buffer>() // v
      .template Ret<Buffer>() // out
      .template Ret<Rows>();  // lse
}
template <typename Binding> auto bind_backward(Binding&& binding) {
  return bind_call(std::move(binding))
      .template Arg<Buffer>()  // dout
      .template Arg<Buffer>()  // q
      .template Arg<Buffer>()  // k
      .template Arg<Buffer>()  // v
      .template Arg<Buffer>()  // out
      .template Arg<Rows>()    // lse
      .template Arg<Rows>()    // dlse
      .template Ret<Buffer>()  // dq
      .template Ret<Buffer>()  // dk
      .template Ret<Buffer>(); // dv
}
template <typename Binding> auto bind_sparse_linear_forward(Binding&& binding) {
  return bind_call(std::move(binding))
      .template Arg<Buffer>() // q
      .template Arg<Buffer>() // k
      .template Arg<Buffer>() // v
      .template Arg<Words>()  // bits
      .template Arg<Rows>()   // alpha
      .template Ret<Buffer>() // out
      .template Ret<Buffer>() // sparse_out
      .template Ret<Rows>();  // lse
}
template <typename Binding> auto bind_sparse_linear_backward(Binding&& binding) {
  return bind_call(std::move(binding))
      .template Arg<Buffer>() // dout
      .template Arg<Buffer>() // q
      .template Arg<Buffer>() // k
      .template Arg<Buffer>() // v
      .template Arg<Buffer>() // sparse_out
      .template Arg<Rows>()   // lse
      .template Arg<Words>()  // bits
      .template Arg<Rows>()   // alpha
      .template Ret<Buffer>() // dq
      .template Ret<Buffer>() // dk
      .template Ret<Buffer>() // dv
      .template Ret<Rows>();  // dalpha
}

auto on_gpu() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<Scratch>()
      .Ctx<ffi::DeviceOrdinal>();
}
template <auto pass>
constexpr auto kOnGpu = [](void* stream, Scratch scratch, int32_t device, std::string_view spec,
                           std::string_view layout, float scale, auto... tensors) {
  const auto allocate = [&](size_t bytes, size_t alignment) {
    return scratch.allocate(bytes, alignment);
  };
  return pass({device, stream, allocate}, {spec, layout, scale}, tensors...);
};

/// For tests: a simulated GPU's memory is the host's, which is XLA's CPU and has no scratch memory.
/// The stand-in for that gives no better alignment than XLA does on GPUs, and refuses as XLA does.
template <auto pass>
constexpr auto kSimulated =
    [](std::string_view spec, std::string_view layout, float scale, auto... tensors) {
      std::vector<char> memory;
      const auto allocate = [&](size_t bytes, size_t alignment) -> void* {
        if (alignment > kXlaAlignment)
          throw std::runtime_error("Unsupported alignment: " + std::to_string(alignment));
        memory.resize(bytes + 2 * kWorkspaceAlignment);
        size_t there = memory.size();
        void* place = memory.data();
        std::align(kWorkspaceAlignment, 1, place, there);
        return static_cast<char*>(place) + kXlaAlignment;
      };
      return pass({0, nullptr, allocate}, {spec, layout, scale}, tensors...);
    };

constexpr auto kOnCpu = [](auto...) {
  return ffi::Error::InvalidArgument(
      "these arrays are on the CPU; the kernels need a CUDA GPU: move them by jax.device_put. For "
      "the CPU there are sagebwd.trace and sagebwd.reference");
};

XLA_FFI_DEFINE_HANDLER(forward_on_gpu, kOnGpu<forward>, bind_forward(on_gpu()));
XLA_FFI_DEFINE_HANDLER(backward_on_gpu, kOnGpu<backward>, bind_backward(on_gpu()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_forward_on_gpu, kOnGpu<sparse_linear_forward>,
                       bind_sparse_linear_forward(on_gpu()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_backward_on_gpu, kOnGpu<sparse_linear_backward>,
                       bind_sparse_linear_backward(on_gpu()));
XLA_FFI_DEFINE_HANDLER(forward_on_cpu, kOnCpu, bind_forward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(backward_on_cpu, kOnCpu, bind_backward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_forward_on_cpu, kOnCpu,
                       bind_sparse_linear_forward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_backward_on_cpu, kOnCpu,
                       bind_sparse_linear_backward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(forward_simulated, kSimulated<forward>, bind_forward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(backward_simulated, kSimulated<backward>, bind_backward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_forward_simulated, kSimulated<sparse_linear_forward>,
                       bind_sparse_linear_forward(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_backward_simulated, kSimulated<sparse_linear_backward>,
                       bind_sparse_linear_backward(ffi::Ffi::Bind()));

} // namespace

std::vector<python::JaxTarget> python::jax_targets() {
  const auto of = [](auto* handler) { return reinterpret_cast<void*>(handler); };
  return {{"forward", "CUDA", of(forward_on_gpu)},
          {"forward", "cpu", of(forward_on_cpu)},
          {"forward", "simulated", of(forward_simulated)},
          {"backward", "CUDA", of(backward_on_gpu)},
          {"backward", "cpu", of(backward_on_cpu)},
          {"backward", "simulated", of(backward_simulated)},
          {"sparse_linear_forward", "CUDA", of(sparse_linear_forward_on_gpu)},
          {"sparse_linear_forward", "cpu", of(sparse_linear_forward_on_cpu)},
          {"sparse_linear_forward", "simulated", of(sparse_linear_forward_simulated)},
          {"sparse_linear_backward", "CUDA", of(sparse_linear_backward_on_gpu)},
          {"sparse_linear_backward", "cpu", of(sparse_linear_backward_on_cpu)},
          {"sparse_linear_backward", "simulated", of(sparse_linear_backward_simulated)}};
}
