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

namespace sagebwd::python {

namespace py = pybind11;

/// (address, batch stride, head stride, token stride), strides in elements.
using TensorTuple = std::array<int64_t, 4>;
/// (batch, heads, heads_kv, seq_q, seq_kv).
using ProblemTuple = std::array<int64_t, 5>;

inline Tensor tensor_of(const TensorTuple& t) {
  return {reinterpret_cast<void*>(t[0]), t[1], t[2], t[3]};
}

inline Problem problem_of(const ProblemTuple& p) { return {p[0], p[1], p[2], p[3], p[4]}; }

template <typename T> T* pointer_of(int64_t address) { return reinterpret_cast<T*>(address); }

inline void bind_attention(py::module_& m) {
  using namespace pybind11::literals;
  using Released = py::call_guard<py::gil_scoped_release>;

  py::class_<Attention>(m, "Attention", "One operation on one device; thread-safe.")
      .def(py::init([](const ResolvedSpec& spec, int device) {
             return std::make_unique<Attention>(*spec, device);
           }),
           "spec"_a, "device"_a = 0, Released())
      .def_property_readonly("spec", [](const Attention& a) { return resolved(a.spec()); })
      .def_property_readonly("arch", [](const Attention& a) { return a.arch().name; })
      .def(
          "warmup",
          [](Attention& a, bool backward, const std::optional<ProblemTuple>& problem) {
            a.warmup(backward, problem ? std::optional(problem_of(*problem)) : std::nullopt);
          },
          "backward"_a = true, "problem"_a = std::nullopt, Released(),
          "Compiles and loads every kernel.")
      .def(
          "forward_workspace_bytes",
          [](const Attention& a, const ProblemTuple& p) {
            return a.forward_workspace_bytes(problem_of(p));
          },
          "problem"_a)
      .def(
          "backward_workspace_bytes",
          [](const Attention& a, const ProblemTuple& p) {
            return a.backward_workspace_bytes(problem_of(p));
          },
          "problem"_a)
      .def(
          "forward",
          [](Attention& a, const ProblemTuple& problem, const TensorTuple& q, const TensorTuple& k,
             const TensorTuple& v, const TensorTuple& out, int64_t lse, float softmax_scale,
             int64_t workspace, size_t workspace_bytes, int64_t stream) {
            ForwardArgs args;
            args.problem = problem_of(problem);
            args.q = tensor_of(q);
            args.k = tensor_of(k);
            args.v = tensor_of(v);
            args.out = tensor_of(out);
            args.lse = pointer_of<float>(lse);
            args.softmax_scale = softmax_scale;
            args.workspace = pointer_of<void>(workspace);
            args.workspace_bytes = workspace_bytes;
            args.stream = pointer_of<void>(stream);
            a.forward(args);
          },
          "problem"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "softmax_scale"_a, "workspace"_a,
          "workspace_bytes"_a, "stream"_a, Released())
      .def(
          "backward",
          [](Attention& a, const ProblemTuple& problem, const TensorTuple& dout,
             const TensorTuple& q, const TensorTuple& k, const TensorTuple& v,
             const TensorTuple& out, int64_t lse, int64_t dlse, const TensorTuple& dq,
             const TensorTuple& dk, const TensorTuple& dv, float softmax_scale, int64_t workspace,
             size_t workspace_bytes, int64_t stream) {
            BackwardArgs args;
            args.problem = problem_of(problem);
            args.dout = tensor_of(dout);
            args.q = tensor_of(q);
            args.k = tensor_of(k);
            args.v = tensor_of(v);
            args.out = tensor_of(out);
            args.lse = pointer_of<float>(lse);
            args.dlse = pointer_of<float>(dlse);
            args.dq = tensor_of(dq);
            args.dk = tensor_of(dk);
            args.dv = tensor_of(dv);
            args.softmax_scale = softmax_scale;
            args.workspace = pointer_of<void>(workspace);
            args.workspace_bytes = workspace_bytes;
            args.stream = pointer_of<void>(stream);
            a.backward(args);
          },
          "problem"_a, "dout"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dlse"_a, "dq"_a, "dk"_a,
          "dv"_a, "softmax_scale"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a, Released());
}

} // namespace sagebwd::python
