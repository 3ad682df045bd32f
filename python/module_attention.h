//===- module_attention.h - The operation, called with addresses -----------===//
//
// No tensor type crosses this line: the package passes addresses, strides and a stream, so one
// module serves every version of every framework.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "runtime/attention.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>

namespace pybind11::detail {

/// Structs that Python gives as a tuple of their `count` numbers.
template <typename Struct, size_t count> struct numbers_caster {
  PYBIND11_TYPE_CASTER(Struct, const_name("tuple[int, ...]"));
  bool load(handle source, bool convert) {
    make_caster<std::array<int64_t, count>> numbers;
    if (!numbers.load(source, convert))
      return false;
    assign(value, numbers);
    return true;
  }

private:
  static void assign(sagebwd::Problem& p, const std::array<int64_t, 5>& n) {
    p = {n[0], n[1], n[2], n[3], n[4]};
  }
  static void assign(sagebwd::Tensor& t, const std::array<int64_t, 4>& n) {
    t = {reinterpret_cast<void*>(n[0]), n[1], n[2], n[3]};
  }
};

/// (batch, heads, heads_kv, seq_q, seq_kv).
template <> struct type_caster<sagebwd::Problem> : numbers_caster<sagebwd::Problem, 5> {};
/// (address, batch stride, head stride, token stride), strides in elements.
template <> struct type_caster<sagebwd::Tensor> : numbers_caster<sagebwd::Tensor, 4> {};

} // namespace pybind11::detail

namespace sagebwd::python {

namespace py = pybind11;

template <typename T = void> T* pointer_of(int64_t address) {
  return reinterpret_cast<T*>(address);
}

inline void bind_attention(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;

  py::class_<Attention>(m, "Attention", "One operation on one device; thread-safe.")
      .def(py::init([](const ResolvedSpec& spec, int device) {
             return std::make_unique<Attention>(*spec, device);
           }),
           Released())
      .def_property_readonly("spec", [](const Attention& a) { return resolved(a.spec()); })
      .def_property_readonly("arch", [](const Attention& a) { return a.arch().name; })
      .def("warmup", &Attention::warmup, Released(), "Compiles and loads every kernel.")
      .def("forward_workspace_bytes", &Attention::forward_workspace_bytes)
      .def("backward_workspace_bytes", &Attention::backward_workspace_bytes)
      .def(
          "forward",
          [](Attention& a, const Problem& problem, const Tensor& q, const Tensor& k,
             const Tensor& v, const Tensor& out, int64_t lse, float softmax_scale,
             int64_t workspace, size_t workspace_bytes, int64_t stream) {
            a.forward({problem, q, k, v, out, pointer_of<float>(lse), softmax_scale,
                       pointer_of(workspace), workspace_bytes, pointer_of(stream)});
          },
          Released())
      .def(
          "backward",
          [](Attention& a, const Problem& problem, const Tensor& dout, const Tensor& q,
             const Tensor& k, const Tensor& v, const Tensor& out, int64_t lse, int64_t dlse,
             const Tensor& dq, const Tensor& dk, const Tensor& dv, float softmax_scale,
             int64_t workspace, size_t workspace_bytes, int64_t stream) {
            a.backward({problem, q, k, v, out, dout, pointer_of<float>(lse),
                        pointer_of<float>(dlse), dq, dk, dv, softmax_scale, pointer_of(workspace),
                        workspace_bytes, pointer_of(stream)});
          },
          Released());
}

} // namespace sagebwd::python
