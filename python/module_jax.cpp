//===- module_jax.cpp - Both passes as calls of XLA -------------------------===//
//
// jax.ffi registers these: XLA hands over its buffers, which are contiguous, its stream and memory
// for the workspace. Shapes were checked when the call was traced (integrations/jax.py).
//
//===----------------------------------------------------------------------===//
#include "python/module_jax_call.h"

using namespace sagebwd;
using namespace sagebwd::python::jax;

namespace {

using Words = ffi::Buffer<ffi::U32>;

struct Call {
  std::string_view spec, layout;
  float softmax_scale;
};

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

/// `max_logits`: none or one, as the spec has it.
template <typename... Heads>
ffi::Error forward(const Where& where, const Call& call, const Buffer& q, const Buffer& k,
                   const Buffer& v, Out<Buffer> out, Out<Rows> lse, Heads... max_logits) {
  return guarded([&] {
    const auto attention = operation(std::string(call.spec), where.device);
    ForwardArgs args;
    begin(args, q, k, v, call);
    args.out = tensor(*out, call.layout);
    args.lse = lse->typed_data();
    ((args.max_logits = max_logits->typed_data()), ...);
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

template <auto pass> auto bound(auto&& binding) {
  return with_arrays_of(pass, std::move(binding)
                                  .template Attr<std::string_view>("spec")
                                  .template Attr<std::string_view>("layout")
                                  .template Attr<float>("softmax_scale"));
}

template <auto pass>
constexpr auto kOnGpu = [](void* stream, Scratch scratch, int32_t device, std::string_view spec,
                           std::string_view layout, float scale, auto... tensors) {
  return pass({device, stream, scratch_of(scratch)}, {spec, layout, scale}, tensors...);
};

template <auto pass>
constexpr auto kSimulated =
    [](std::string_view spec, std::string_view layout, float scale, auto... tensors) {
      std::vector<char> memory;
      return pass({0, nullptr, simulated_scratch(memory)}, {spec, layout, scale}, tensors...);
    };

XLA_FFI_DEFINE_HANDLER(forward_on_gpu, kOnGpu<forward<>>, bound<forward<>>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(forward_max_logits_on_gpu, kOnGpu<forward<Out<Rows>>>,
                       bound<forward<Out<Rows>>>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(backward_on_gpu, kOnGpu<backward>, bound<backward>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_forward_on_gpu, kOnGpu<sparse_linear_forward>,
                       bound<sparse_linear_forward>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_backward_on_gpu, kOnGpu<sparse_linear_backward>,
                       bound<sparse_linear_backward>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(forward_on_cpu, kOnCpu, bound<forward<>>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(forward_max_logits_on_cpu, kOnCpu,
                       bound<forward<Out<Rows>>>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(backward_on_cpu, kOnCpu, bound<backward>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_forward_on_cpu, kOnCpu,
                       bound<sparse_linear_forward>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_backward_on_cpu, kOnCpu,
                       bound<sparse_linear_backward>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(forward_simulated, kSimulated<forward<>>,
                       bound<forward<>>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(forward_max_logits_simulated, kSimulated<forward<Out<Rows>>>,
                       bound<forward<Out<Rows>>>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(backward_simulated, kSimulated<backward>, bound<backward>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_forward_simulated, kSimulated<sparse_linear_forward>,
                       bound<sparse_linear_forward>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(sparse_linear_backward_simulated, kSimulated<sparse_linear_backward>,
                       bound<sparse_linear_backward>(ffi::Ffi::Bind()));

} // namespace

std::vector<python::JaxTarget> python::jax_targets() {
  const auto of = [](auto* handler) { return reinterpret_cast<void*>(handler); };
  std::vector<JaxTarget> targets = {
      {"forward", "CUDA", of(forward_on_gpu)},
      {"forward", "cpu", of(forward_on_cpu)},
      {"forward", "simulated", of(forward_simulated)},
      {"forward_max_logits", "CUDA", of(forward_max_logits_on_gpu)},
      {"forward_max_logits", "cpu", of(forward_max_logits_on_cpu)},
      {"forward_max_logits", "simulated", of(forward_max_logits_simulated)},
      {"backward", "CUDA", of(backward_on_gpu)},
      {"backward", "cpu", of(backward_on_cpu)},
      {"backward", "simulated", of(backward_simulated)},
      {"sparse_linear_forward", "CUDA", of(sparse_linear_forward_on_gpu)},
      {"sparse_linear_forward", "cpu", of(sparse_linear_forward_on_cpu)},
      {"sparse_linear_forward", "simulated", of(sparse_linear_forward_simulated)},
      {"sparse_linear_backward", "CUDA", of(sparse_linear_backward_on_gpu)},
      {"sparse_linear_backward", "cpu", of(sparse_linear_backward_on_cpu)},
      {"sparse_linear_backward", "simulated", of(sparse_linear_backward_simulated)}};
  for (JaxTarget& target : jax::front_targets())
    targets.push_back(std::move(target));
  return targets;
}
