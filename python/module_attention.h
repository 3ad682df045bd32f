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

/// A number for each of its fields.
template <> struct type_caster<sagebwd::Problem> {
  PYBIND11_TYPE_CASTER(sagebwd::Problem, const_name("tuple[int, ...]"));
  static constexpr size_t kNumbers = [] {
    size_t count = 0;
    sagebwd::Problem problem;
    visit_fields(problem, [&](const sagebwd::Label&, int64_t&) { ++count; });
    return count;
  }();
  bool load(handle source, bool convert) {
    make_caster<std::array<int64_t, kNumbers>> numbers;
    if (!numbers.load(source, convert))
      return false;
    size_t i = 0;
    const std::array<int64_t, kNumbers>& given = numbers;
    visit_fields(value, [&](const sagebwd::Label&, int64_t& field) { field = given[i++]; });
    return true;
  }
};

} // namespace pybind11::detail

namespace sagebwd::python {

namespace py = pybind11;

// Short of pybind11's casters: they take 5 % of a call's host time.
inline int64_t number_of(PyObject* given) {
  const int64_t number = PyLong_AsLongLong(given);
  if (number == -1 && PyErr_Occurred())
    throw py::error_already_set();
  return number;
}
/// The address of what has no strides.
template <typename T> void load(PyObject* given, T*& pointer) {
  pointer = reinterpret_cast<T*>(number_of(given));
}
/// (address, batch stride, head stride, token stride), strides in elements.
inline void load(PyObject* given, Tensor& tensor) {
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4)
    throw py::type_error("a tensor is given as (address, batch, head and token strides)");
  const auto number = [&](int i) { return number_of(PyTuple_GET_ITEM(given, i)); };
  tensor = {reinterpret_cast<void*>(number(0)), number(1), number(2), number(3)};
}

/// A pass: its tensors in the order of visit_tensors(), addresses of the workspace and the stream.
template <typename Args, void (Attention::*pass)(const Args&)>
void run(Attention& attention, const Problem& problem, const py::tuple& tensors,
         float softmax_scale, int64_t workspace, size_t workspace_bytes, int64_t stream) {
  Args args{.problem = problem,
            .softmax_scale = softmax_scale,
            .workspace = reinterpret_cast<void*>(workspace),
            .workspace_bytes = workspace_bytes,
            .stream = reinterpret_cast<void*>(stream)};
  size_t count = 0;
  visit_tensors(args, [&](Operand, auto& tensor) {
    if (count < tensors.size())
      load(PyTuple_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(count)), tensor);
    ++count;
  });
  if (count != tensors.size())
    throw py::type_error("this pass takes " + std::to_string(count) + " tensors, given are " +
                         std::to_string(tensors.size()));
  const py::gil_scoped_release released;
  (attention.*pass)(args);
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
      .def("forward", &run<ForwardArgs, &Attention::forward>)
      .def("backward", &run<BackwardArgs, &Attention::backward>);
}

} // namespace sagebwd::python
