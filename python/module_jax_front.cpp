//===- module_jax_front.cpp - Norm and RoPE as calls of XLA -----------------===//
//
// Arrays of no number stand for what a call does not have: gains, 1/rms, tables, and gradients that
// are not wanted. Shapes were checked when the call was traced (integrations/_jax_front.py).
//
//===----------------------------------------------------------------------===//
#include "python/module_jax_call.h"

#include "runtime/front_end.h"

using namespace sagebwd;
using namespace sagebwd::python::jax;

namespace {

/// All but normed is of both q and k.
struct FrontTold {
  std::string_view spec, layout;
  float eps;
  int64_t begin;
  bool interleaved, q_normed, k_normed;
};

float* numbers(const Rows& array) {
  return array.element_count() == 0 ? nullptr : array.typed_data();
}
float* numbers(Out<Rows> array) { return numbers(*array); }

FrontSide front_side(const Buffer& x, const Buffer& y, bool normed, const Rows& gain,
                     const Rows& inv_rms, const Rows& cos, const Rows& sin,
                     std::string_view layout) {
  FrontSide made{.x = tensor(x, layout),
                 .y = tensor(y, layout),
                 .normed = normed,
                 .gain = numbers(gain),
                 .gain_per_head = gain.dimensions().size() == 2,
                 .inv_rms = numbers(inv_rms),
                 .inv_rms_per_head = inv_rms.dimensions().size() == 3};
  if (numbers(cos)) { // (batch or 1, tokens, pairs)
    const auto dims = cos.dimensions();
    made.rope = {numbers(cos), numbers(sin), dims[0] > 1 ? dims[1] * dims[2] : 0, dims[2]};
  }
  return made;
}

FrontCall front_call(const Where& where, const FrontTold& told, const Buffer& q, const Buffer& k,
                     const FrontSide& of_q, const FrontSide& of_k, const Rows& cos) {
  const Shape queries(q, told.layout), keys(k, told.layout);
  const int pairs = numbers(cos) ? static_cast<int>(cos.dimensions()[2]) : 0;
  return {.problem = {queries.batch, queries.heads, keys.heads, queries.tokens, keys.tokens},
          .q = of_q,
          .k = of_k,
          .norm_eps = told.eps,
          .rope_begin = static_cast<int>(told.begin),
          .rope_channels = 2 * pairs,
          .rope_interleaved = told.interleaved,
          .stream = where.stream};
}

ffi::Error norm_and_rotate(const Where& where, const FrontTold& told, const Buffer& q,
                           const Buffer& k, const Rows& q_gain, const Rows& k_gain,
                           const Rows& q_inv_rms, const Rows& k_inv_rms, const Rows& q_cos,
                           const Rows& q_sin, const Rows& k_cos, const Rows& k_sin,
                           Out<Buffer> of_q, Out<Buffer> of_k) {
  return guarded([&] {
    front(front_call(
              where, told, q, k,
              front_side(q, *of_q, told.q_normed, q_gain, q_inv_rms, q_cos, q_sin, told.layout),
              front_side(k, *of_k, told.k_normed, k_gain, k_inv_rms, k_cos, k_sin, told.layout),
              q_cos),
          *operation(std::string(told.spec), where.device));
  });
}

ffi::Error norm_and_rotate_gradients(const Where& where, const FrontTold& told, const Buffer& dy_q,
                                     const Buffer& dy_k, const Buffer& q, const Buffer& k,
                                     const Rows& q_gain, const Rows& k_gain, const Rows& q_inv_rms,
                                     const Rows& k_inv_rms, const Rows& q_cos, const Rows& q_sin,
                                     const Rows& k_cos, const Rows& k_sin, Out<Buffer> dq,
                                     Out<Buffer> dk, Out<Rows> dq_gain, Out<Rows> dk_gain,
                                     Out<Rows> dq_inv_rms, Out<Rows> dk_inv_rms) {
  return guarded([&] {
    const auto attention = operation(std::string(told.spec), where.device);
    FrontGradientsCall call{
        .of = front_call(
            where, told, q, k,
            front_side(q, dy_q, told.q_normed, q_gain, q_inv_rms, q_cos, q_sin, told.layout),
            front_side(k, dy_k, told.k_normed, k_gain, k_inv_rms, k_cos, k_sin, told.layout),
            q_cos),
        .q = {.dx = tensor(*dq, told.layout),
              .dgain = numbers(dq_gain),
              .dinv_rms = numbers(dq_inv_rms)},
        .k = {.dx = tensor(*dk, told.layout),
              .dgain = numbers(dk_gain),
              .dinv_rms = numbers(dk_inv_rms)}};
    const auto floats = [&](Tokens tokens, const FrontSideGradients& of) {
      return of.dgain ? front_part_floats(tokens, attention->spec(), call.of.problem) : 0;
    };
    // Both are of whole heads, so that the second begins at a multiple of 16 bytes, too.
    const int64_t of_q = floats(Tokens::queries, call.q), of_k = floats(Tokens::keys, call.k);
    if (of_q + of_k > 0) {
      auto* parts = static_cast<float*>(
          where.allocate(static_cast<size_t>(of_q + of_k) * sizeof(float), kXlaAlignment));
      call.q.gain_parts = of_q ? parts : nullptr;
      call.k.gain_parts = of_k ? parts + of_q : nullptr;
    }
    front_gradients(call, *attention);
  });
}

//===--- What XLA calls ---------------------------------------------------===//

template <auto pass> auto front_bound(auto&& binding) {
  return with_arrays_of(pass, std::move(binding)
                                  .template Attr<std::string_view>("spec")
                                  .template Attr<std::string_view>("layout")
                                  .template Attr<float>("eps")
                                  .template Attr<int64_t>("begin")
                                  .template Attr<bool>("interleaved")
                                  .template Attr<bool>("q_normed")
                                  .template Attr<bool>("k_normed"));
}

template <auto pass>
constexpr auto kFrontOnGpu = [](void* stream, Scratch scratch, int32_t device,
                                std::string_view spec, std::string_view layout, float eps,
                                int64_t begin, bool interleaved, bool q_normed, bool k_normed,
                                auto... tensors) {
  return pass({device, stream, scratch_of(scratch)},
              {spec, layout, eps, begin, interleaved, q_normed, k_normed}, tensors...);
};
template <auto pass>
constexpr auto kFrontSimulated = [](std::string_view spec, std::string_view layout, float eps,
                                    int64_t begin, bool interleaved, bool q_normed, bool k_normed,
                                    auto... tensors) {
  std::vector<char> memory;
  return pass({0, nullptr, simulated_scratch(memory)},
              {spec, layout, eps, begin, interleaved, q_normed, k_normed}, tensors...);
};

XLA_FFI_DEFINE_HANDLER(front_forward_on_gpu, kFrontOnGpu<norm_and_rotate>,
                       front_bound<norm_and_rotate>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(front_backward_on_gpu, kFrontOnGpu<norm_and_rotate_gradients>,
                       front_bound<norm_and_rotate_gradients>(on_gpu()));
XLA_FFI_DEFINE_HANDLER(front_forward_on_cpu, kOnCpu,
                       front_bound<norm_and_rotate>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(front_backward_on_cpu, kOnCpu,
                       front_bound<norm_and_rotate_gradients>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(front_forward_simulated, kFrontSimulated<norm_and_rotate>,
                       front_bound<norm_and_rotate>(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(front_backward_simulated, kFrontSimulated<norm_and_rotate_gradients>,
                       front_bound<norm_and_rotate_gradients>(ffi::Ffi::Bind()));

} // namespace

std::vector<python::JaxTarget> python::jax::front_targets() {
  const auto of = [](auto* handler) { return reinterpret_cast<void*>(handler); };
  return {{"front_forward", "CUDA", of(front_forward_on_gpu)},
          {"front_forward", "cpu", of(front_forward_on_cpu)},
          {"front_forward", "simulated", of(front_forward_simulated)},
          {"front_backward", "CUDA", of(front_backward_on_gpu)},
          {"front_backward", "cpu", of(front_backward_on_cpu)},
          {"front_backward", "simulated", of(front_backward_simulated)}};
}
