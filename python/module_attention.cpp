//===- module_attention.cpp - The operation, called with addresses ---------===//
//
// No tensor type crosses this line: the package passes sizes and strides once, then addresses and a
// stream, so one module serves every version of every framework.
//
//===----------------------------------------------------------------------===//

#include "generator/choice.h"
#include "python/module.h"
#include "python/module_gil.h"
#include "runtime/driver/driver.h"

#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace sagebwd::python {

namespace {

// Short of pybind11's casters: they take 5 % of a call's host time.
int64_t number_of(PyObject* given) {
  const int64_t number = PyLong_AsLongLong(given);
  if (number == -1 && PyErr_Occurred())
    throw py::error_already_set();
  return number;
}

/// `strides`: of each strided tensor in the order of visit_tensors(): batch, head, token.
template <typename Args>
PreparedPass prepare(const Attention& attention, const Problem& problem,
                     const std::vector<std::array<int64_t, 3>>& strides, float softmax_scale,
                     bool apart, int value_dim) {
  Args args{.problem = problem,
            .softmax_scale = softmax_scale,
            .packing = {.apart = apart},
            .value_dim = value_dim};
  size_t count = 0;
  visit_tensors(args, [&]<typename T>(Operand, T& tensor) {
    if constexpr (std::is_same_v<T, Tensor>) {
      if (count < strides.size())
        tensor = {nullptr, strides[count][0], strides[count][1], strides[count][2]};
      ++count;
    }
  });
  if (count != strides.size())
    throw py::type_error("this pass takes the strides of " + std::to_string(count) +
                         " tensors, given are " + std::to_string(strides.size()));
  return attention.prepare(args);
}

/// Numbers: the tensors' addresses, those of the workspace and the stream.
void run(const PreparedPass& pass, const py::args& given) {
  std::array<uint64_t, 32> numbers; // more than any pass has; a test gives one all of its own
  const size_t count = given.size();
  if (count < 2 || count > numbers.size())
    throw py::type_error("a pass takes its tensors' addresses, the workspace's and the stream");
  for (size_t i = 0; i < count; ++i)
    numbers[i] =
        static_cast<uint64_t>(number_of(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i))));
  {
    const Released released;
    pass.run(std::span(numbers).first(count - 2), numbers[count - 2],
             reinterpret_cast<void*>(numbers[count - 1]));
  }
  log_to_python();
}

} // namespace

void bind_attention(py::module_& m) {
  m.def("check_value_dim",
        [](int value_dim, const ResolvedSpec& spec) { check_value_dim(value_dim, spec); });
  using WithoutGil = py::call_guard<Released>;

  py::class_<Attention>(m, "Attention", "One operation on one device; thread-safe.")
      .def(py::init([](const ResolvedSpec& spec, int device, const std::string& family) {
             if (family.empty())
               return std::make_unique<Attention>(*spec, device);
             const auto wanted = parse_word<Family>(family); // before there need be a device
             const auto info = driver::device_info(device);
             const Arch& arch = arch_for_capability(info.major, info.minor);
             return std::make_unique<Attention>(*spec, device, default_tiles(spec, arch, wanted));
           }),
           WithoutGil(), py::arg("spec"), py::arg("device"), py::arg("family") = "",
           "With a family the kernels have its default tiles; else those of records, or the GPU's.")
      .def_property_readonly("spec", [](const Attention& a) { return resolved(a.spec()); })
      .def_property_readonly("arch", [](const Attention& a) { return a.arch().name; })
      .def(
          "warmup",
          [](Attention& attention, bool backward, const std::optional<Problem>& problem) {
            {
              const Released released;
              attention.warmup(backward, problem);
            }
            log_to_python();
          },
          "Compiles and loads every kernel.")
      .def(
          "build_ahead",
          [](Attention& attention, const Problem& problem, uint64_t stream) {
            {
              const Released released;
              attention.build_ahead(problem, reinterpret_cast<void*>(stream));
            }
            log_to_python();
          },
          "Builds the kernels of both passes side by side.")
      .def("forward_workspace_bytes", &Attention::forward_workspace_bytes)
      .def("backward_workspace_bytes", &Attention::backward_workspace_bytes)
      .def("prepare_forward", &prepare<ForwardArgs>, py::arg("problem"), py::arg("strides"),
           py::arg("softmax_scale"), py::arg("apart") = false, py::arg("value_dim") = 0)
      .def("prepare_backward", &prepare<BackwardArgs>, py::arg("problem"), py::arg("strides"),
           py::arg("softmax_scale"), py::arg("apart") = false, py::arg("value_dim") = 0);

  py::class_<PreparedPass>(m, "PreparedPass", "A pass over tensors of one size; thread-safe.")
      .def_property_readonly("workspace_bytes", &PreparedPass::workspace_bytes)
      .def("__call__", &run);
}

} // namespace sagebwd::python
