//===- module_jax_call.h - What calls of XLA have in common -----------------===//
//
// Only files that are compiled with jaxlib's headers include it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "python/module_jax.h"

#include "runtime/attention.h"

#include <xla/ffi/api/ffi.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace sagebwd::python::jax {

namespace ffi = xla::ffi;
using Buffer = ffi::AnyBuffer;
using Rows = ffi::Buffer<ffi::F32>;
template <typename T> using Out = ffi::Result<T>;

/// The kernels want their workspace at a multiple of this, and XLA gives memory at no larger one
/// than the second: it refuses to be asked for more.
inline constexpr size_t kWorkspaceAlignment = 256, kXlaAlignment = 16;

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

} // namespace sagebwd::python::jax

template <> struct xla::ffi::CtxDecoding<sagebwd::python::jax::Scratch> {
  using Type = sagebwd::python::jax::Scratch;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine&) {
    return std::optional<Type>(std::in_place, api, context);
  }
};

namespace sagebwd::python::jax {

struct Where {
  int device;
  void* stream;
  Allocate allocate;
};

/// Made once for each line of options and device. Beyond as many, of a program whose windows keep
/// changing, all are forgotten: their kernels are shared.
inline constexpr size_t kMostOperations = 256;
inline std::shared_ptr<Attention> operation(const std::string& spec, int device) {
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

inline Tensor tensor(const Buffer& buffer, std::string_view layout) {
  const Shape s(buffer, layout);
  const int64_t head = s.heads_first ? s.tokens * s.channels : s.channels;
  const int64_t token = s.heads_first ? s.channels : s.heads * s.channels;
  return {buffer.untyped_data(), s.heads * s.tokens * s.channels, head, token};
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

/// For tests: a simulated GPU's memory is the host's, which is XLA's CPU and has no scratch memory.
/// The stand-in for that gives no better alignment than XLA does on GPUs, and refuses as XLA does.
inline Allocate simulated_scratch(std::vector<char>& memory) {
  return [&memory](size_t bytes, size_t alignment) -> void* {
    if (alignment > kXlaAlignment)
      throw std::runtime_error("Unsupported alignment: " + std::to_string(alignment));
    memory.resize(bytes + 2 * kWorkspaceAlignment);
    size_t there = memory.size();
    void* place = memory.data();
    std::align(kWorkspaceAlignment, 1, place, there);
    return static_cast<char*>(place) + kXlaAlignment;
  };
}
inline Allocate scratch_of(Scratch& scratch) {
  return [&scratch](size_t bytes, size_t alignment) { return scratch.allocate(bytes, alignment); };
}

/// What XLA calls where there is no GPU.
inline constexpr auto kOnCpu = [](auto...) {
  return ffi::Error::InvalidArgument(
      "these arrays are on the CPU; the kernels need a CUDA GPU: move them by jax.device_put. For "
      "the CPU there are sagebwd.trace and sagebwd.reference");
};

inline auto on_gpu() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<Scratch>()
      .Ctx<ffi::DeviceOrdinal>();
}

/// How XLA hands over a parameter of a pass: `const T&` is an array, Out<T> one for a result.
template <typename Given> struct Handed {
  static auto by(auto&& binding) { return std::move(binding).template Arg<Given>(); }
};
template <typename Given> struct Handed<Out<Given>> {
  static auto by(auto&& binding) { return std::move(binding).template Ret<Given>(); }
};
template <typename First, typename... Rest> auto bind_arrays(auto&& binding) {
  using Handing = Handed<std::remove_cvref_t<First>>;
  if constexpr (sizeof...(Rest) == 0)
    return Handing::by(std::move(binding));
  else
    return bind_arrays<Rest...>(Handing::by(std::move(binding)));
}
/// A binding with the arrays of a pass, in the order of its parameters.
template <typename Told, typename... Arrays>
auto with_arrays_of(ffi::Error (*)(const Where&, const Told&, Arrays...), auto&& binding) {
  return bind_arrays<Arrays...>(std::move(binding));
}

/// The calls of module_jax_front.cpp.
std::vector<JaxTarget> front_targets();

} // namespace sagebwd::python::jax
